"""Do overlapping patches help? Arms, budgets and seeds of docs/overlap.md, on digits.

    python scripts/sweep.py --sweep configs/sweeps/overlap_digits.py --workdir runs/overlap

Each arm has the learning rates that configs/sweeps/overlap_digits_lr.py chose for it on
validation images, for short and for long training. The test images are read once, at the
end of each trial.
"""

from vit_jax import config as config_lib
from vit_jax.sweep.space import arm, chain, grid, product


def patches(patch, stride, pad, mode="zero"):
  return {
    "model.patch": patch,
    "model.stride": stride,
    "model.pad": pad,
    "model.pad_mode": mode,
  }


# Images have 8x8 pixels.
ARMS = {
  # 16 tokens: no overlap, and more and more of it.
  "P2S2": patches(2, 2, 0),
  "P3S2": patches(3, 2, 1),
  "P4S2": patches(4, 2, 1),
  # The same without zeros around the image, which tell a token where the border is.
  "P4S2 edge": patches(4, 2, 1, "edge"),
  "P4S2 reflect": patches(4, 2, 1, "reflect"),
  # 64 tokens: pixels, and the window around each.
  "P1S1": patches(1, 1, 0),
  "P3S1": patches(3, 1, 1),
  # 4 tokens: one linear map; wide enough to cost what 16 tokens cost; a non-linear stem
  # without overlap, and one with it.
  "P4S4": patches(4, 4, 0),
  "P4S4 wide": patches(4, 4, 0) | {"model.width": 68},
  "P4 hmlp": {"model.patch": 4, "model.tokenizer": "hmlp"},
  "P4 conv": {"model.patch": 4, "model.tokenizer": "conv"},
}

# Learning rate of each arm, in short and in long training.
RATES = {
  "P2S2": (8e-3, 1.6e-2),
  "P3S2": (1.6e-2, 1.6e-2),
  "P4S2": (8e-3, 8e-3),
  "P4S2 edge": (8e-3, 1.6e-2),
  "P4S2 reflect": (8e-3, 8e-3),
  "P1S1": (3.2e-2, 8e-3),
  "P3S1": (1.6e-2, 8e-3),
  "P4S4": (8e-3, 1.6e-2),
  "P4S4 wide": (4e-3, 4e-3),
  "P4 hmlp": (4e-3, 4e-3),
  "P4 conv": (1.6e-2, 1.6e-2),
}
SHORT = ["20 epochs", "40 epochs"]
LONG = ["80 epochs", "160 epochs"]


def get_config():
  config = config_lib.default()
  config.data.name = "digits"
  config.data.batch_size = 64
  config.data.eval_batch_size = 360
  config.model.width = 32
  config.model.depth = 3
  config.model.heads = 2
  config.model.mlp_ratio = 2.0
  config.model.pool = "mean"
  config.augment.crop = 1
  config.train.log_every = "1 epochs"
  config.train.eval_every = "0 steps"
  config.train.checkpoint_every = "20 epochs"
  config.train.steps_per_call = 23
  return config


def get_sweep():
  trials = chain(
    *(
      product(
        grid("train.length", lengths),
        arm(name, settings),
        grid("optim.lr", [RATES[name][column]]),
      )
      for column, lengths in enumerate((SHORT, LONG))
      for name, settings in ARMS.items()
    )
  )
  return product(trials, grid("seed", range(8)))

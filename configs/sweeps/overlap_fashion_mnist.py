"""Do overlapping patches help on Fashion-MNIST? In full, for an accelerator.

    python scripts/sweep.py --sweep configs/sweeps/overlap_fashion_mnist.py --workdir runs/overlap_fashion_mnist --dry_run
    python scripts/sweep.py --sweep configs/sweeps/overlap_fashion_mnist.py --workdir runs/overlap_fashion_mnist
    python scripts/report.py --workdir runs/overlap_fashion_mnist --by arm --within train.length --tune optim.lr
    python scripts/report.py --workdir runs/overlap_fashion_mnist --by arm --within train.length --tune optim.lr --against "P2S2"

Arms of 49 tokens and arms of 196, each with three learning rates: the report takes the
best one of an arm by its validation images. The test images are read once.
"""

import pathlib

from vit_jax import config as config_lib
from vit_jax import config_files
from vit_jax.sweep.space import arm, chain, grid, product

patches = config_files.load(
  pathlib.Path(__file__).with_name("overlap_digits.py")
).patches

# Images have 28x28 pixels.
ARMS = {
  # 49 tokens.
  "P4S4": patches(4, 4, 0),
  "P6S4": patches(6, 4, 1),
  "P8S4": patches(8, 4, 2),
  # 196 tokens.
  "P2S2": patches(2, 2, 0),
  "P4S2": patches(4, 2, 1),
}


def get_config():
  config = config_lib.default()
  config.data.name = "fashion_mnist"
  config.data.val = 5_000
  config.data.batch_size = 128
  config.data.eval_batch_size = 500
  config.model.width = 64
  config.model.depth = 6
  config.model.heads = 4
  config.model.mlp_ratio = 2.0
  config.model.pool = "mean"
  config.augment.crop = 1
  config.augment.flip = True
  config.train.log_every = "1 epochs"
  config.train.eval_every = "0 steps"
  config.train.checkpoint_every = "10 epochs"
  config.train.steps_per_call = 20
  return config


def get_sweep():
  budgets = grid("train.length", ["30 epochs", "100 epochs", "300 epochs"])
  arms = chain(*(arm(name, settings) for name, settings in ARMS.items()))
  rates = grid("optim.lr", [1e-3, 2e-3, 4e-3])
  return product(budgets, arms, rates, grid("seed", range(8)))

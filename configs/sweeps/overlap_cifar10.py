"""Do overlapping patches help on CIFAR-10? In full, for an accelerator.

    python scripts/sweep.py --sweep configs/sweeps/overlap_cifar10.py --workdir runs/overlap_cifar10 --dry_run
    python scripts/sweep.py --sweep configs/sweeps/overlap_cifar10.py --workdir runs/overlap_cifar10
    python scripts/report.py --workdir runs/overlap_cifar10 --by arm --within train.length --tune optim.lr

The model and the augmentation of configs/cifar10.py, without dropout. Arms of 64 patches
and one of 16, each with three learning rates: the report takes the best one of an arm by
its validation images. The test images are read once.
"""

import pathlib

from vit_jax import config_files
from vit_jax.sweep.space import arm, chain, grid, product

HERE = pathlib.Path(__file__)
patches = config_files.load(HERE.with_name("overlap_digits.py")).patches

# Images have 32x32 pixels.
ARMS = {
  # 64 tokens: no overlap, and more and more of it; and without zeros at the border.
  "P4S4": patches(4, 4, 0),
  "P6S4": patches(6, 4, 1),
  "P8S4": patches(8, 4, 2),
  "P8S4 edge": patches(8, 4, 2, "edge"),
  # 64 tokens: a stem of overlapping convolutions, and one without overlap.
  "P4 conv": {"model.patch": 4, "model.tokenizer": "conv"},
  "P4 hmlp": {"model.patch": 4, "model.tokenizer": "hmlp"},
  # 16 tokens.
  "P8S8": patches(8, 8, 0),
}


def get_config():
  config = config_files.read(HERE.parents[1] / "cifar10.py")
  config.data.val = 5_000
  config.model.dropout = 0.0
  config.train.log_every = "1 epochs"
  config.train.eval_every = "0 steps"
  config.train.checkpoint_every = "10 epochs"
  return config


def get_sweep():
  budgets = grid("train.length", ["50 epochs", "100 epochs", "200 epochs"])
  arms = chain(*(arm(name, settings) for name, settings in ARMS.items()))
  rates = grid("optim.lr", [2.5e-4, 5e-4, 1e-3])
  return product(budgets, arms, rates, grid("seed", range(8)))

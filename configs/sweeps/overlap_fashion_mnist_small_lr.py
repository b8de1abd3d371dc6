"""The learning rate of each arm of configs/sweeps/overlap_fashion_mnist_small.py: four
rates for each, on seeds that the study does not use, judged on validation images.

    python scripts/sweep.py --sweep configs/sweeps/overlap_fashion_mnist_small_lr.py --workdir runs/overlap_fashion_mnist_small_lr
    python scripts/report.py --workdir runs/overlap_fashion_mnist_small_lr --by optim.lr --within arm --metric val/accuracy
"""

import pathlib

from vit_jax import config_files
from vit_jax.sweep.space import arm, chain, grid, product

STUDY = config_files.load(
  pathlib.Path(__file__).with_name("overlap_fashion_mnist_small.py")
)


def get_config():
  config = STUDY.get_config()
  config.data.val = 5_000
  return config


def get_sweep():
  arms = chain(*(arm(name, settings) for name, settings in STUDY.ARMS.items()))
  rates = grid("optim.lr", [2e-3, 4e-3, 8e-3, 1.6e-2])
  return product(arms, rates, grid("seed", [100]))

"""The learning rate of each arm of configs/sweeps/overlap_digits.py: five rates for each,
for short and for long training, on seeds that the study does not use, judged on
validation images.

    python scripts/sweep.py --sweep configs/sweeps/overlap_digits_lr.py --workdir runs/overlap_lr
    python scripts/report.py --workdir runs/overlap_lr --by optim.lr --within train.length,arm --metric val/accuracy
"""

import pathlib

from vit_jax import config_files
from vit_jax.sweep.space import arm, chain, grid, product

STUDY = config_files.load(pathlib.Path(__file__).with_name("overlap_digits.py"))


def get_config():
  config = STUDY.get_config()
  config.data.val = 0.3
  return config


def get_sweep():
  arms = chain(*(arm(name, settings) for name, settings in STUDY.ARMS.items()))
  # As many steps as 20 and 80 epochs of all training images: 30 % are for validation.
  lengths = grid("train.length", ["30 epochs", "120 epochs"])
  rates = grid("optim.lr", [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2])
  return product(lengths, arms, rates, grid("seed", [100, 101]))

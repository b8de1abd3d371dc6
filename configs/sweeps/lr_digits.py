"""Learning rate of configs/digits.py, chosen on a validation cut: twelve rates from
5e-4 to 5e-2, of which the better half goes on at 10, 20 and 40 epochs.

    python scripts/sweep.py --sweep configs/sweeps/lr_digits.py --workdir runs/lr_digits
"""

import pathlib

from vit_jax import config_files
from vit_jax.sweep.space import log_uniform, sample

CONFIGS = pathlib.Path(__file__).parents[1]


def get_config():
  config = config_files.read(CONFIGS / "digits.py")
  config.data.val = 0.15
  config.train.halving = ("10 epochs", 0.5)
  return config


def get_sweep():
  return sample(12, {"optim.lr": log_uniform(5e-4, 5e-2)}, seed=0)

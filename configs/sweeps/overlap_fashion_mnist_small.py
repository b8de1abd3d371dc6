"""Do overlapping patches help on Fashion-MNIST? What a CPU does of docs/overlap.md.

    python scripts/sweep.py --sweep configs/sweeps/overlap_fashion_mnist_small.py --workdir runs/overlap_fashion_mnist_small

10,000 training images and 49 tokens in all arms, so that arms differ in overlap alone.
"14" has images averaged down to 14x14 (`box`: a pixel knows nothing of its neighbours'),
"28" has them as they are. configs/sweeps/overlap_fashion_mnist_small_lr.py chose the
learning rates.
"""

import pathlib

from vit_jax import config as config_lib
from vit_jax import config_files
from vit_jax.sweep.space import arm, chain, grid, product

patches = config_files.load(
  pathlib.Path(__file__).with_name("overlap_digits.py")
).patches

SMALL = {"data.image_size": 14, "data.interpolation": "box"}
ARMS = {
  "14 P2S2": patches(2, 2, 0) | SMALL,
  "14 P4S2": patches(4, 2, 1) | SMALL,
  "28 P4S4": patches(4, 4, 0),
  "28 P6S4": patches(6, 4, 1),
  "28 P8S4": patches(8, 4, 2),
}
RATES = dict.fromkeys(ARMS, 4e-3)


def get_config():
  config = config_lib.default()
  config.data.name = "fashion_mnist"
  config.data.train_size = 10_000
  config.data.batch_size = 64
  config.data.eval_batch_size = 500
  config.model.width = 48
  config.model.depth = 4
  config.model.heads = 3
  config.model.mlp_ratio = 2.0
  config.model.pool = "mean"
  config.augment.crop = 1
  config.augment.flip = True
  config.train.length = "10 epochs"
  config.train.log_every = "1 epochs"
  config.train.eval_every = "0 steps"
  config.train.checkpoint_every = "2 epochs"
  config.train.steps_per_call = 26
  return config


def get_sweep():
  arms = (
    product(arm(name, settings), grid("optim.lr", [RATES[name]]))
    for name, settings in ARMS.items()
  )
  return product(chain(*arms), grid("seed", range(8)))

"""scikit-learn's digits (1,797 real 8x8 images, no download), stratified 1437 / 360.

Patches of 3x3 pixels at stride 1 with one pixel of padding: 64 tokens, each pixel seen
by up to nine of them. Results stand in the README.

    python scripts/train.py --config configs/digits.py --workdir runs/digits
"""

from vit_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.data.name = "digits"
  config.data.batch_size = 128
  config.data.eval_batch_size = 360
  config.model.patch = 3
  config.model.stride = 1
  config.model.pad = 1
  config.model.width = 48
  config.model.depth = 3
  config.model.heads = 2
  config.model.mlp_ratio = 2.0
  config.model.pool = "mean"
  config.augment.crop = 1
  config.augment.mixup = 0.4
  config.optim.name = "muon"
  config.optim.lr = 5e-3
  config.train.length = "70 epochs"
  config.train.log_every = "20 steps"
  config.train.eval_every = "10 epochs"
  config.train.checkpoint_every = "10 epochs"
  config.train.steps_per_call = 20
  return config

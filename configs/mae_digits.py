"""Masked-autoencoder pre-training on digits: three quarters of the patches are hidden,
and the model rebuilds them; labels are not read.

    python scripts/train.py --config configs/mae_digits.py --workdir runs/mae_digits

What comes next is `configs/finetune.py`.
"""

from vit_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.data.name = "digits"
  config.data.batch_size = 64
  config.model.patch = 2
  config.model.width = 48
  config.model.depth = 4
  config.model.mlp_ratio = 2.0
  config.augment.crop = 1
  config.loss.name = "mae"
  config.loss.mask_ratio = 0.75
  config.optim.lr = 2e-3
  config.train.length = "100 epochs"
  config.train.steps_per_call = 25
  config.train.log_every = "100 steps"
  config.train.eval_every = "20 epochs"
  config.train.checkpoint_every = "20 epochs"
  return config

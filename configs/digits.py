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
  config.optim.lr = 2e-3
  config.train.length = "40 epochs"
  config.train.steps_per_call = 25
  config.train.log_every = "100 steps"
  config.train.eval_every = "10 epochs"
  config.train.checkpoint_every = "10 epochs"
  return config

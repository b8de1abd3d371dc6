"""Fashion-MNIST (60,000 / 10,000 images, 28x28) with at most 206,000 parameters.

A convolutional stem in place of the linear map: overlapping windows of 7x7 pixels at
stride 4, so 49 tokens; mean pooling. Published for a plain ViT of this size: 92.3 %
after 200 epochs; the result of this file stands in the README.

    python scripts/train.py --config configs/fashion_mnist.py --workdir runs/fashion_mnist
"""

from vit_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.data.name = "fashion_mnist"
  config.data.batch_size = 128
  config.data.eval_batch_size = 500
  config.model.tokenizer = "conv"
  config.model.patch = 4
  config.model.width = 64
  config.model.depth = 5
  config.model.heads = 4
  config.model.mlp_ratio = 2.0
  config.model.pool = "mean"
  config.augment.crop = 1
  config.augment.flip = True
  config.optim.name = "muon"
  config.optim.lr = 5e-3
  config.optim.weight_decay = 0.05
  config.optim.ema = 0.999
  config.train.length = "30 epochs"
  config.train.log_every = "100 steps"
  config.train.eval_every = "5 epochs"
  config.train.checkpoint_every = "1 epoch"
  config.train.steps_per_call = 20
  return config

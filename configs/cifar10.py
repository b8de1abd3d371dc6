"""CIFAR-10 (50,000 / 10,000 images, 32x32), the reference model of the tutorials:
1,205,898 parameters, 65 tokens, 83.6 million multiply-accumulates an image.

Expect 76.7 to 82.1 % after 200 epochs with shift and flip, 86.3 % with RandAugment too
(published for this geometry: github.com/ishaa05/vit-design-study and
s-chh/PyTorch-Scratch-Vision-Transformer-ViT; not measured here, see the README).

Needs the official binary archive, cifar-10-binary.tar.gz, in the folder:

    python scripts/train.py --config configs/cifar10.py --workdir runs/cifar10 \\
        --config.data.dir=data/cifar10
"""

from vit_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.data.name = "cifar10"
  config.data.batch_size = 128
  config.data.eval_batch_size = 500
  config.model.update(config_lib.SIZES["tutorial"])
  config.model.patch = 4
  config.model.dropout = 0.1
  config.augment.crop = 4
  config.augment.flip = True
  config.augment.randaugment = (2, 9)
  config.optim.lr = 5e-4
  config.optim.warmup = "10 epochs"
  config.train.length = "200 epochs"
  config.train.eval_every = "5 epochs"
  config.train.checkpoint_every = "5 epochs"
  config.train.steps_per_call = 20
  return config

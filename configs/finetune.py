"""Fine-tuning: starts from the parameters of another run and takes what fits. A head
for other classes, and what a masked autoencoder lacks, begin at random; the run says so.

    python scripts/train.py --config configs/finetune.py --workdir runs/finetune \\
        --config.init.source=runs/mae_digits

Model and data here are those of `configs/mae_digits.py`. For another source, give the
model its sizes (`config` in its config.json), or what differs is left out.
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
  config.init.partial = True
  config.optim.lr = 4e-3
  config.train.length = "20 epochs"
  config.train.steps_per_call = 25
  config.train.log_every = "50 steps"
  config.train.eval_every = "5 epochs"
  config.train.checkpoint_every = "5 epochs"
  return config

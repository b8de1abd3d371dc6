"""A model, a loss and a data set of one's own, without a change in the package.

    python examples/own_parts.py --workdir runs/own_parts

Trains a small MLP-Mixer (Tolstikhin et al. 2021) with the focal loss (Lin et al. 2017)
to tell rings from discs, and evaluates it. What each part must offer is said in
`train.run` (model), `losses` (loss) and `datasets.Dataset` (data).
"""

import hashlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from vit_jax import command, config, evaluate, losses, train
from vit_jax.data import datasets

flags.DEFINE_string("workdir", None, "run folder, made if missing")
flags.DEFINE_string("length", "8 epochs", 'such as "20 steps"')


class Mixer(nn.Module):
  """Patches -> [MLP over tokens, MLP over channels] x 2 -> mean -> logits."""

  classes: int
  width: int = 32

  @nn.compact
  def __call__(self, images, *, keys=None, hyper=None):
    del keys, hyper  # random keys [B] and traced settings: nothing here needs them
    x = nn.Conv(self.width, (4, 4), (4, 4), name="tokenizer")(images)
    x = x.reshape(len(x), -1, self.width)
    for i in range(2):
      y = nn.LayerNorm(name=f"norm_tokens_{i}")(x).swapaxes(1, 2)
      x = x + self._mlp(y, f"tokens_{i}").swapaxes(1, 2)
      x = x + self._mlp(nn.LayerNorm(name=f"norm_channels_{i}")(x), f"channels_{i}")
    return nn.Dense(self.classes, name="head")(x.mean(axis=1))

  def _mlp(self, x, name):
    y = nn.gelu(nn.Dense(2 * self.width, name=f"{name}_up")(x))
    return nn.Dense(x.shape[-1], name=f"{name}_down")(y)


def focal(logits, targets):
  """Cross-entropy [B] of logits [B K], times (1 - p)^2 of the true class."""
  logs = jax.nn.log_softmax(logits)
  return -(targets * (1 - jnp.exp(logs)) ** 2 * logs).sum(-1)


def shapes(count, seed, size=16):
  """Returns noisy grey images, uint8 [n, h, w, 1]: discs (0) and rings (1)."""
  draw = np.random.default_rng(seed)
  labels = draw.integers(0, 2, count, dtype=np.int32)
  centre = draw.uniform(6, size - 7, (2, count, 1, 1))
  y, x = np.mgrid[:size, :size][:, None]
  distance = np.hypot(y - centre[0], x - centre[1])
  inner = np.where(labels, 2.5, 0)[:, None, None]
  grey = 60 + 120 * ((distance < 5) & (distance >= inner))
  grey = grey + draw.normal(0, 40, grey.shape)
  return datasets.Split(np.clip(grey, 0, 255).astype(np.uint8)[..., None], labels)


def dataset():
  train_split, test_split = shapes(2000, seed=0), shapes(500, seed=1)
  grey = train_split.images / 255
  return datasets.Dataset(
    name="shapes",
    train=train_split,
    val=None,
    test=test_split,
    classes=("disc", "ring"),
    mean=(float(grey.mean()),),
    std=(float(grey.std()),),
    # What a checkpoint remembers its data by.
    fingerprint=hashlib.sha256(train_split.images.tobytes()).hexdigest(),
  )


def main(arguments):
  del arguments
  workdir = command.required("workdir")
  command.prepare_jax()
  loss = losses.Classification(focal)
  parts = dict(model=Mixer(classes=2), loss=loss, data=dataset())
  settings = config.default()
  settings.data.batch_size = 64
  settings.optim.lr = 3e-3
  settings.train.length = flags.FLAGS.length
  settings.train.eval_every = "0 steps"
  settings.train.steps_per_call = 10
  train.run(settings, workdir, **parts)
  result = evaluate.run(workdir, **parts)
  print(f"test accuracy {result['accuracy']:.4f}, loss {result['loss']:.4f}")


if __name__ == "__main__":
  command.main(main, __doc__)

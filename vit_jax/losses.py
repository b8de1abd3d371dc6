"""Objectives: what training minimises and what evaluation reports, per example.

An objective is an object with two methods (`Classification` is the model to copy):

    train(apply, batch, hyper, keys) -> {"loss": [B], ...}
    evaluate(apply, batch, hyper) -> {"loss": [B], ...}

`apply(images, keys=None, hyper=None)` is the model with its parameters; `batch` holds
normalised `image` [B h w C], `label` int32 [B], `target` float32 [B K] (mixed labels,
training only) and `row` int32 [B]; `keys` are one per example. The step takes
weighted sums over examples and divides once, so an objective never averages. What
`train` and `evaluate` give is reported under its name; `predicted` and `confidence` of
`evaluate` are for accuracy and calibration.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax import config as config_lib


def softmax_cross_entropy(
  logits: Float[Array, "B K"], targets: Float[Array, "B K"]
) -> Float[Array, " B"]:
  """Returns -sum_k target_k log softmax(logits)_k."""
  return optax.softmax_cross_entropy(logits, targets)


def sigmoid_cross_entropy(
  logits: Float[Array, "B K"], targets: Float[Array, "B K"]
) -> Float[Array, " B"]:
  """Returns the binary cross-entropies of all classes, summed (Beyer et al. 2020)."""
  return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1)


def smoothed(targets: Float[Array, "B K"], share) -> Float[Array, "B K"]:
  """Spreads a share of each label over all classes; rows still sum to 1."""
  return targets * (1 - share) + share / targets.shape[-1]


class Classification:
  """Cross-entropy on labels.

  Attributes:
    cross_entropy: (logits, targets) -> loss of each example.
    probabilities: logits -> what the model believes, for confidence and calibration.
  """

  def __init__(
    self,
    cross_entropy: Callable = softmax_cross_entropy,
    probabilities: Callable = jax.nn.softmax,
  ):
    self.cross_entropy = cross_entropy
    self.probabilities = probabilities

  def train(self, apply, batch, hyper, keys):
    """Returns loss and accuracy; where labels are mixed, accuracy is the share of the
    predicted class in the mixture (for plain labels: right or wrong)."""
    logits = apply(batch["image"], keys=keys, hyper=hyper["model"])
    targets = smoothed(batch["target"], hyper["loss"]["label_smoothing"])
    right = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1]) * batch["target"]
    return {"loss": self.cross_entropy(logits, targets), "accuracy": right.sum(-1)}

  def evaluate(self, apply, batch, hyper):
    """Returns loss without smoothing, predicted class, its probability, and whether
    the label is among the five highest logits (where there are more than five)."""
    logits = apply(batch["image"], hyper=hyper["model"])
    classes = logits.shape[-1]
    targets = jax.nn.one_hot(batch["label"], classes)
    out = {
      "loss": self.cross_entropy(logits, targets),
      "predicted": logits.argmax(-1).astype(jnp.int32),
      "confidence": self.probabilities(logits).max(-1),
    }
    if classes > 5:
      _, five = jax.lax.top_k(logits, 5)
      out["top5"] = (five == batch["label"][:, None]).any(-1)
    return out


class MaskedAutoencoder:
  """The model rebuilds hidden patches and returns the loss of each example itself
  (`models.mae`); labels are not read."""

  def train(self, apply, batch, hyper, keys):
    return {"loss": apply(batch["image"], keys=keys, hyper=hyper["model"])}

  def evaluate(self, apply, batch, hyper):
    """Hides the same patches of an example at every evaluation; no other noise."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), batch["row"])
    quiet = {**hyper["model"], "dropout": 0.0, "drop_path": 0.0}
    return {"loss": apply(batch["image"], keys=keys, hyper=quiet)}


def make(config: config_lib.Loss):
  """Returns the objective of this name."""
  if config.name == "mae":
    return MaskedAutoencoder()
  if config.name == "sigmoid":
    return Classification(sigmoid_cross_entropy, jax.nn.sigmoid)
  return Classification(softmax_cross_entropy, jax.nn.softmax)

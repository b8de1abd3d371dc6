"""One training step and one evaluation step of one member: pure functions.

    init(hyper) -> state
    train_step(state, batch, hyper, reduce) -> state, metrics
    eval_step(params, batch, hyper) -> per-example values

They know no devices, no members and no Python state; `devices.py` maps and shards
them. Everything random is folded from a named stream, the global step and the row of
the example in the global batch.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config as config_lib
from vit_jax import optim
from vit_jax.data.augment import augment


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What the step must know of the data.

  Attributes:
    shape: height, width, channels of the images.
    classes: number of classes.
    mean, std: of the channels, in shares of 255.
  """

  shape: tuple[int, int, int]
  classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]

  @classmethod
  def recorded(cls, data: dict) -> "Inputs":
    """Returns those of a run from `data` of its config.json."""
    return cls(
      tuple(data["shape"]),
      len(data["classes"]),
      tuple(data["mean"]),
      tuple(data["std"]),
    )

  def normalise(self, images):
    """Returns (pixel / 255 - mean) / std, float32, of pixels [B h w C] in 0..255."""
    mean, std = (
      jnp.asarray(values, jnp.float32)[None, None, None] * 255
      for values in (self.mean, self.std)
    )
    return (images.astype(jnp.float32) - mean) / std


@dataclasses.dataclass(frozen=True)
class Steps:
  """The three functions of a run."""

  init: Callable[[Any], Any]
  train_step: Callable[..., Any]
  eval_step: Callable[..., Any]


def seed_words(seed: int) -> np.ndarray:
  """Returns uint32[2] from an integer of any size (`jax.random.key` would cut it)."""
  digest = hashlib.sha256(f"seed {seed}".encode()).digest()
  return np.frombuffer(digest[:8], np.uint32)


def stream(seed, name: str):
  """Returns the key of a named stream. Streams get their tag before any number is
  folded in: `split(k, n)[i]` equals `fold_in(k, i)`, so that untagged ones collide."""
  key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
  return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def row_keys(seed, name: str, step, rows):
  """Returns one key per row of the global batch, [B]."""
  key = jax.random.fold_in(stream(seed, name), step)
  return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def hyper(config: config_lib.Config, warmup_steps: float, model: dict) -> dict:
  """Returns the traced settings of a member, NumPy scalars named as in the config, and
  `active`: whether it is still in the race.

  Args:
    config: the member's configuration.
    warmup_steps: `optim.warmup` in optimizer steps.
    model: traced settings of the model (`models.traceable`).
  """
  scalars = {
    "optim": {
      "lr": config.optim.lr,
      "warmup": warmup_steps,
      "weight_decay": config.optim.weight_decay,
      "clip_norm": config.optim.clip_norm or np.inf,
    },
    "loss": {"label_smoothing": config.loss.label_smoothing},
    "model": model,
    "augment": {
      "erasing": config.augment.erasing,
      "mixup": config.augment.mixup,
      "cutmix": config.augment.cutmix,
    },
  }
  scalars = jax.tree.map(np.float32, scalars)
  return {"seed": seed_words(config.seed), "active": np.True_, **scalars}


def make(
  config: config_lib.Config,
  model,
  objective,
  optimizer: optim.Optimizer,
  inputs: Inputs,
) -> Steps:
  """Returns the steps of a run.

  Args:
    config: reads `augment`, `optim.accumulate` and `optim.ema`.
    model: has `init(key, images)` and `apply({"params": p}, images, keys=, hyper=)`.
    objective: see `losses`.
    optimizer: see `optim`.
    inputs: shape and normalisation of the images.
  """

  def init(hyper):
    images = jnp.zeros((1, *inputs.shape), jnp.float32)
    params = model.init(stream(hyper["seed"], "init"), images)["params"]
    state = {
      "step": jnp.zeros((), jnp.int32),
      "params": params,
      "opt_state": optimizer.init(params),
    }
    if config.optim.ema is not None:
      state["ema"] = params
    return state

  def sums(params, batch, hyper, step):
    """Returns the summed loss of a micro-batch and all sums over its examples."""
    seed, rows, weight = hyper["seed"], batch["row"], batch["weight"]
    images, targets = augment(
      config.augment,
      row_keys(seed, "augment", step, rows),
      batch["image"].astype(jnp.float32),
      jax.nn.one_hot(batch["label"], inputs.classes),
      hyper["augment"],
      weight > 0,
    )
    batch = {**batch, "image": inputs.normalise(images), "target": targets}

    def apply(images, **kwargs):
      return model.apply({"params": params}, images, **kwargs)

    keys = row_keys(seed, "model", step, rows)
    values = objective.train(apply, batch, hyper, keys)
    # A row of weight 0 is padding: its values do not count.
    totals = {
      name: jnp.where(weight > 0, value * weight, 0).sum()
      for name, value in values.items()
    }
    totals["weight"] = weight.sum()
    return totals["loss"], totals

  def train_step(state, batch, hyper, reduce=lambda tree: tree):
    """Returns the next state and the metrics of this step.

    Args:
      state: `step`, `params`, `opt_state` and, with a moving average, `ema`.
      batch: `image` uint8 [B h w C], `label` int32 [B], `row` int32 [B] (in the global
        batch), `weight` float32 [B] (0 for padding).
      hyper: traced settings.
      reduce: sums a tree over devices; the identity where `B` is the global batch.

    A step whose loss or gradient is not finite changes nothing, not even the step
    number; its `finite` is 0.
    """
    step, params = state["step"], state["params"]
    grad = jax.grad(sums, has_aux=True)
    parts = config.optim.accumulate
    if parts == 1:
      grads, totals = grad(params, batch, hyper, step)
    else:
      micro = jax.tree.map(lambda leaf: _micro_batches(leaf, parts), batch)
      first = jax.tree.map(lambda leaf: leaf[0], micro)
      shapes = jax.eval_shape(grad, params, first, hyper, step)
      zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

      def add(total, part):
        return jax.tree.map(jnp.add, total, grad(params, part, hyper, step)), ()

      (grads, totals), _ = jax.lax.scan(add, zeros, micro)
    grads, totals = reduce((grads, totals))
    count = jnp.maximum(totals.pop("weight"), 1)
    grads = jax.tree.map(lambda g: g / count, grads)
    metrics = {name: total / count for name, total in totals.items()}

    updates, opt_state, info = optimizer.update(
      grads, state["opt_state"], params, step, hyper
    )
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(info["gradient_norm"])
    new = {
      "params": jax.tree.map(jnp.add, params, updates),
      "opt_state": opt_state,
    }
    if "ema" in state:
      share = 1 - config.optim.ema
      new["ema"] = jax.tree.map(
        lambda mean, value: mean + share * (value - mean), state["ema"], new["params"]
      )
    old = {name: state[name] for name in new}
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    metrics |= info | {"finite": finite.astype(jnp.float32)}
    metrics |= _update_ratios(updates, params)
    return {"step": step + finite.astype(step.dtype), **new}, metrics

  def eval_step(params, batch, hyper):
    """Returns what the objective says of each example: a dict of [B] arrays."""
    batch = {**batch, "image": inputs.normalise(batch["image"])}

    def apply(images, **kwargs):
      return model.apply({"params": params}, images, **kwargs)

    return objective.evaluate(apply, batch, hyper)

  return Steps(init, train_step, eval_step)


def _micro_batches(leaf, parts):
  """Cuts [B ...] into [parts, B / parts, ...]. Neighbours stay together in twos (mixup
  pairs them); otherwise rows are dealt out in turn, so that each device keeps its own."""
  size = leaf.shape[0] // parts
  together = 2 if size % 2 == 0 else 1
  dealt = leaf.reshape(size // together, parts, together, *leaf.shape[1:])
  return jnp.moveaxis(dealt, 1, 0).reshape(parts, size, *leaf.shape[1:])


def _update_ratios(updates, params):
  """Returns |update| / |parameters| of each top-level part of the model; 0 where all
  parameters are 0, as those of the head are at the start."""

  def norm(tree):
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))

  sizes = {name: norm(params[name]) for name in params}
  return {
    f"update_ratio/{name}": jnp.where(size > 0, norm(updates[name]) / size, 0.0)
    for name, size in sizes.items()
  }

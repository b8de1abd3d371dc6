"""Every setting of a run, with its default and its meaning, written once.

`configs/*.py` build a `ConfigDict` from `default()` and change what differs; flags
override single values; `parse` turns the result into the frozen `Config` that the
package reads. This module imports no JAX, so a bad value is refused at once.
"""

import dataclasses
import difflib
import fractions
import math
import numbers
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections
from ml_collections import config_dict


class ConfigError(ValueError):
  """A setting that cannot be used: one line that says what came and what to try."""


@dataclasses.dataclass(frozen=True)
class Pair:
  """Height and width in pixels. Written as `8`, `(8, 12)` or `[8, 12]`."""

  height: int
  width: int

  def __iter__(self):
    return iter((self.height, self.width))

  def __str__(self):
    return f"{self.height}x{self.width}"


@dataclasses.dataclass(frozen=True)
class Duration:
  """A length of training: `"30 epochs"`, `"500 steps"`, `"1e5 examples"`, `"5 %"`.

  Attributes:
    amount: how many of the unit; not negative.
    unit: `"epochs"`, `"steps"`, `"examples"` or `"%"` (of the whole run).
  """

  amount: float
  unit: str

  def __str__(self):
    short = f"{self.amount:g}"
    # Six digits where they are the whole number: what is written is read back exactly.
    amount = short if float(short) == self.amount else repr(self.amount)
    return f"{amount} {self.unit}"


@dataclasses.dataclass(frozen=True)
class Model:
  """The vision transformer. Sizes default to the reference model of the tutorials."""

  # Height and width of a patch in pixels.
  patch: Pair = Pair(4, 4)
  # Distance between neighbouring patches; below `patch` they overlap. None: `patch`.
  stride: Pair | None = None
  # Pixels added on every side, or "same": patch - stride in all, so that the grid is
  # size / stride.
  pad: Pair | Literal["same"] = Pair(0, 0)
  # What the added pixels hold.
  pad_mode: Literal["zero", "edge", "reflect"] = "zero"
  # How patches become tokens: one linear map, a stack of strided 3x3 convolutions
  # (overlapping), or a hierarchy of small non-overlapping ones (hMLP).
  tokenizer: Literal["linear", "conv", "hmlp"] = "linear"
  # Channels of a token.
  width: int = 128
  # Number of blocks.
  depth: int = 6
  # Attention heads; each has width / heads channels.
  heads: int = 4
  # Hidden channels of the MLP, as a multiple of `width`.
  mlp_ratio: float = 4.0
  # "gelu" is the tanh form, "gelu_erf" the exact one; "swiglu" has a gate.
  mlp: Literal["gelu", "gelu_erf", "swiglu"] = "gelu"
  # How a token knows its place.
  positions: Literal["learned", "sincos1d", "sincos2d", "rope2d", "none"] = "learned"
  # What the head reads: a class token, the mean over patches, or attention pooling.
  pool: Literal["cls", "mean", "map"] = "cls"
  # Extra learned tokens without a position, never pooled.
  registers: int = 0
  # Start value of a learned scale on each residual branch; None: no such scale.
  layer_scale: float | None = None
  # Probability that an example skips a residual branch in the last block, rising
  # linearly from 0 in the first.
  drop_path: float = 0.0
  # Dropout rate on tokens, attention output and MLP.
  dropout: float = 0.0
  # Normalise queries and keys, head by head.
  qk_norm: bool = False
  # "dense" forms all weights (float32 softmax); "chunked", as exact, a block of them at
  # a time: less memory, somewhat slower; "fused" calls jax.nn.dot_product_attention.
  attention: Literal["dense", "chunked", "fused"] = "dense"
  # Multiplier of the scores: "rsqrt" is 1/sqrt(head channels), "none" is 1.
  scale: float | Literal["rsqrt", "none"] = "rsqrt"
  # Compile one block and loop over depth: faster to compile, slower on a CPU.
  scan_layers: bool = False
  # Recompute each block in the backward pass instead of keeping its activations.
  remat: bool = False
  # Type of the activations; parameters, norms and softmax stay float32.
  dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclasses.dataclass(frozen=True)
class Data:
  """Which images, how many at a time."""

  # "digits", "digits:half", "mnist", "fashion_mnist", "cifar10", "cifar100", "folder",
  # "synthetic", or "tfds:NAME".
  name: str = "digits"
  # Folder of the files; None: where the source usually lies.
  dir: str | None = None
  # Images are resized to this; None: as the source has them.
  image_size: Pair | None = None
  # How pixels are weighed in resizing, widened with the reduction; box: plain averages.
  interpolation: Literal["bicubic", "bilinear", "lanczos", "box"] = "bicubic"
  # Share of the training images (below 1) or their number, cut off for validation,
  # the same share of every class, drawn by `seed`.
  val: float = 0.0
  # Share (below 1) or number of the other training images to learn from, the same share
  # of every class, drawn by `seed`; None: all.
  train_size: float | None = None
  # Examples of one optimizer step, over all devices and micro-batches.
  batch_size: int = 128
  # Examples of one evaluation step.
  eval_batch_size: int = 256
  # Refuse the run at the first image that cannot be read, or skip such images with a
  # count.
  unreadable: Literal["refuse", "skip"] = "refuse"


@dataclasses.dataclass(frozen=True)
class Augment:
  """Random changes of the training images, inside the step, a key per example."""

  # Pixels to shift by after zero padding (an integer), or the (least, greatest) share
  # of the area of a random resized crop; 0: off.
  crop: int | tuple[float, float] = 0
  # Mirror left and right, half of the time.
  flip: bool = False
  # (operations, magnitude out of 10) of RandAugment; None: off.
  randaugment: tuple[int, float] | None = None
  # Probability of blanking a random rectangle.
  erasing: float = 0.0
  # Beta parameter of mixup; 0: off.
  mixup: float = 0.0
  # Beta parameter of CutMix; 0: off. With both on, each pair of
  # examples takes one of them.
  cutmix: float = 0.0


@dataclasses.dataclass(frozen=True)
class Optim:
  """The optimizer and its schedule."""

  # The update rule.
  name: Literal["adamw", "sgd", "lion", "lamb", "muon"] = "adamw"
  # Peak learning rate.
  lr: float = 1e-3
  # Shape of the learning rate after warm-up.
  schedule: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
  # Linear rise from 0 at the start; the first update has rate 0.
  warmup: Duration = Duration(5, "%")
  # Linear fall to 0 at the end.
  cooldown: Duration = Duration(0, "steps")
  # Decay of leaves named `kernel`; times the learning rate and its factors, as in
  # AdamW. lamb: inside the trust ratio.
  weight_decay: float = 0.05
  # Greatest global norm of the averaged gradient of the parameters that are trained;
  # None or 0: no limit.
  clip_norm: float | None = 1.0
  # Decay of the first moment (adamw, lamb, and what muon leaves to Adam) or of the
  # momentum (sgd, muon); lion: weight of the momentum in the update.
  momentum: float = 0.9
  # Decay of the second moment (adamw, lamb, muon's Adam part) or of the momentum
  # itself (lion; its paper has 0.99). sgd does not read it.
  second_momentum: float = 0.999
  # Added to the root of the second moment (adamw, lamb, muon's Adam part).
  epsilon: float = 1e-8
  # Micro-batches that `data.batch_size` is cut into.
  accumulate: int = 1
  # Decay of the moving average of the parameters; None: no average.
  ema: float | None = None
  # Factor on the learning rate from one layer down to the next; None: 1.
  layer_decay: float | None = None
  # Regular expression of parameters that stay as they are; None: none.
  freeze: str | None = None
  # (regular expression, factor on the learning rate) pairs; the first match counts.
  multipliers: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Loss:
  """What is minimised."""

  # "softmax" and "sigmoid" (binary) cross-entropy on labels, or "mae": rebuild the
  # hidden patches (a masked autoencoder; labels are not read).
  name: Literal["softmax", "sigmoid", "mae"] = "softmax"
  # Share of the label spread over all classes.
  label_smoothing: float = 0.0
  # Share of hidden patches ("mae").
  mask_ratio: float = 0.75


@dataclasses.dataclass(frozen=True)
class Init:
  """Where the first parameters come from."""

  # Run folder to start from; None: random.
  source: str | None = None
  # Take what fits and say what does not; otherwise a difference is refused.
  partial: bool = False


@dataclasses.dataclass(frozen=True)
class Train:
  """The loop around the step."""

  # Length of the run.
  length: Duration = Duration(30, "epochs")
  # Metrics are written this often.
  log_every: Duration = Duration(50, "steps")
  # Evaluation happens this often; "0 steps": only at the end.
  eval_every: Duration = Duration(1, "epochs")
  # A checkpoint is saved this often, and at the end.
  checkpoint_every: Duration = Duration(5, "epochs")
  # Newest checkpoints kept; None: all.
  keep: int | None = 2
  # Checkpoints at multiples of this stay for good; None: none.
  keep_every: Duration | None = None
  # Validation metric whose best checkpoint is kept; None: none.
  best_metric: str | None = None
  # Optimizer steps of one call of the compiled program.
  steps_per_call: int = 1
  # How the step spreads over devices.
  parallel: Literal["jit", "pmap"] = "jit"
  # Cut parameters and optimizer state over the devices too (parallel = "jit").
  fsdp: bool = False
  # Members of a population that run at once; None: one on a CPU, all elsewhere.
  members_at_once: int | None = None
  # Successive halving of a population, (rung, share): at the rung the best share of the
  # members (on validation data) goes on, at rung / share that share of them, and so on.
  # None: all train to the end.
  halving: tuple[Duration, float] | None = None


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  model: Model = Model()
  data: Data = Data()
  augment: Augment = Augment()
  optim: Optim = Optim()
  loss: Loss = Loss()
  init: Init = Init()
  train: Train = Train()
  # Decides everything random: split, order, start, augmentation, dropout.
  seed: int = 0


# Sizes with a name, as `config.model.update(SIZES["S"])`. Ti, S, B, L: Touvron et al.
# 2021 and Dosovitskiy et al. 2021; g: Zhai et al. 2022; tutorial: the default above.
SIZES = {
  "tutorial": dict(width=128, depth=6, heads=4, mlp_ratio=4.0),
  "Ti": dict(width=192, depth=12, heads=3, mlp_ratio=4.0),
  "S": dict(width=384, depth=12, heads=6, mlp_ratio=4.0),
  "B": dict(width=768, depth=12, heads=12, mlp_ratio=4.0),
  "L": dict(width=1024, depth=24, heads=16, mlp_ratio=4.0),
  "g": dict(width=1408, depth=40, heads=16, mlp_ratio=6144 / 1408),
}

DURATION_FORMS = '"30 epochs", "500 steps", "100000 examples" or "5 %"'
_DURATION = re.compile(
  r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(epochs?|steps?|examples?|%)\s*"
)


def default() -> ml_collections.ConfigDict:
  """Returns a locked `ConfigDict` that holds every default, to be changed and returned."""
  config = ml_collections.ConfigDict(_fields_as_references(Config()))
  config.lock()
  return config


def parse(config: Mapping | Config) -> Config:
  """Turns a `ConfigDict` (or a nested mapping) into a `Config`.

  Args:
    config: nested names and values; names left out keep their defaults. A `Config`
      made in Python is checked in the same way.

  Returns:
    The typed, frozen configuration.

  Raises:
    ConfigError: an unknown name (with the nearest known one), a value of another
      type, or two values that cannot go together.
  """
  if isinstance(config, Config):
    config = to_dict(config)
  elif isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  parsed = _parse_dataclass(Config, config, "")
  _check(parsed)
  return parsed


def override(config: Config, changes: Mapping[str, Any]) -> Config:
  """Returns `config` with dotted names changed, as in `{"model.stride": 2}`."""
  nested = to_dict(config)
  for name, value in changes.items():
    *path, leaf = name.split(".")
    inner = nested
    for part in path:
      if not isinstance(inner.get(part), dict):
        raise _unknown(name, name, names())
      inner = inner[part]
    if leaf not in inner:
      raise _unknown(name, leaf, inner)
    if isinstance(inner[leaf], dict):
      raise ConfigError(
        f"{name!r} is a group; change its settings, as in "
        f"'{name}.{next(iter(inner[leaf]))}'"
      )
    inner[leaf] = value
  return parse(nested)


def to_dict(config: Config) -> dict[str, Any]:
  """Returns nested dictionaries of JSON values; `parse` reads them back."""
  return _plain(config)


def plain(changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns overrides as JSON values."""
  return {name: _plain(value) for name, value in changes.items()}


def value(config: Config, name: str) -> Any:
  """Returns the setting of this dotted name."""
  for part in name.split("."):
    config = getattr(config, part)
  return config


def names() -> list[str]:
  """Returns the dotted name of every setting."""

  def walk(node, prefix):
    for field in dataclasses.fields(node):
      value = getattr(node, field.name)
      if dataclasses.is_dataclass(value) and not isinstance(value, (Pair, Duration)):
        yield from walk(value, f"{prefix}{field.name}.")
      else:
        yield f"{prefix}{field.name}"

  return list(walk(Config(), ""))


def steps(duration: Duration, *, examples: int, batch_size: int, total: int | None):
  """Converts a duration to optimizer steps.

  Args:
    duration: what to convert.
    examples: number of training examples; an epoch is this many.
    batch_size: examples of a step.
    total: steps of the whole run, for `%`; None where the run itself is converted.

  Returns:
    The number of steps, rounded up for epochs and examples (so that every example of
    an epoch is seen), to the nearest for `%`.
  """
  if duration.unit == "steps":
    return round(duration.amount)
  if duration.unit == "%":
    if total is None:
      raise ConfigError(
        f"train.length={str(duration)!r} is a share of itself; try "
        '"30 epochs", "500 steps" or "100000 examples"'
      )
    return round(total * duration.amount / 100)
  # In fractions of the decimal number as written: 2.2 * 100 is above 220 in floats.
  wanted = fractions.Fraction(str(duration.amount))
  if duration.unit == "epochs":
    wanted *= examples
  return math.ceil(wanted / batch_size)


def nearest(name: str, known) -> str:
  """Returns `; did you mean 'x'?`, or the known names where none is near."""
  known = [str(k) for k in known]
  close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
  if close:
    return f"; did you mean {close[0]!r}?"
  return f"; known: {', '.join(known)}"


def nearest_setting(leaf: str) -> str:
  """Returns `nearest` where only the last part of a setting's name is known: with the
  whole names, as several groups may have one."""
  whole = {}
  for name in names():
    whole.setdefault(name.split(".")[-1], []).append(repr(name))
  close = difflib.get_close_matches(leaf, whole, n=1, cutoff=0.5)
  return f"; did you mean {' or '.join(whole[close[0]])}?" if close else ""


def _fields_as_references(node) -> dict[str, Any]:
  """Leaves become untyped references, so that a flag may set any literal: the parser
  below, not the default's type, decides what a value may be."""
  out = {}
  for field in dataclasses.fields(node):
    value = getattr(node, field.name)
    if dataclasses.is_dataclass(value) and not isinstance(value, (Pair, Duration)):
      out[field.name] = _fields_as_references(value)
    else:
      out[field.name] = config_dict.FieldReference(_plain(value), field_type=object)
  return out


def _plain(value):
  if isinstance(value, Pair):
    return [value.height, value.width]
  if isinstance(value, Duration):
    return str(value)
  if dataclasses.is_dataclass(value):
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, (tuple, list)):
    return [_plain(v) for v in value]
  # NumPy's numbers, which a sweep may hold, are not JSON.
  if isinstance(value, numbers.Integral) and not isinstance(value, bool):
    return int(value)
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return float(value)
  return value


def _unknown(path, name, known):
  return ConfigError(f"unknown setting {path!r}{nearest(name, known)}")


def _parse_dataclass(cls, values, path):
  if not isinstance(values, Mapping):
    raise ConfigError(f"{path or 'config'}={values!r} is not a group of settings")
  hints = typing.get_type_hints(cls)
  for name in values:
    if name not in hints:
      raise _unknown(f"{path}.{name}".lstrip("."), name, hints)
  parsed = {}
  for name, value in values.items():
    full = f"{path}.{name}".lstrip(".")
    hint = hints[name]
    if dataclasses.is_dataclass(hint) and hint not in (Pair, Duration):
      parsed[name] = _parse_dataclass(hint, value, full)
    else:
      parsed[name] = _parse_value(hint, value, full)
  return cls(**parsed)


def _parse_value(hint, value, path):
  options = _options(hint)
  for option in options:
    try:
      return _convert(option, value)
    except (TypeError, ValueError, OverflowError):
      continue
  literals = [a for o in options for a in typing.get_args(o) if _is_literal(o)]
  hint_text = ""
  if isinstance(value, str) and literals:
    hint_text = nearest(value, literals)
  raise ConfigError(f"{path}={value!r}: expected {_expected(options)}{hint_text}")


def _options(hint):
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return list(typing.get_args(hint))
  return [hint]


def _is_literal(hint):
  return typing.get_origin(hint) is Literal


def _convert(hint, value):
  """Returns `value` as `hint`, or raises `ValueError`."""
  if hint is type(None):
    if value is None:
      return None
  elif _is_literal(hint):
    if isinstance(value, str) and value in typing.get_args(hint):
      return value
  elif hint is Pair:
    if isinstance(value, (list, tuple, Pair)):
      value = tuple(value)
      if len(value) == 2:
        return Pair(_integer(value[0]), _integer(value[1]))
    else:
      return Pair(_integer(value), _integer(value))
  elif hint is Duration:
    return _duration(value)
  elif hint is bool:
    if isinstance(value, bool):
      return value
    if value in ("true", "false"):  # not literals, but common
      return value == "true"
  elif hint is int:
    return _integer(value)
  elif hint is float:
    # absl leaves "1e-3" to us only if it is not a literal.
    known = isinstance(value, (numbers.Real, str)) and not isinstance(value, bool)
    if known and math.isfinite(float(value)):
      return float(value)
  elif hint is str:
    if isinstance(value, str):
      return value
  elif typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
    inner = typing.get_args(hint)
    if len(inner) == 2 and inner[1] is Ellipsis:
      return tuple(_convert(inner[0], v) for v in value)
    if len(inner) == len(value):
      return tuple(_convert(h, v) for h, v in zip(inner, value))
  raise ValueError


def _integer(value):
  if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
    raise ValueError
  if isinstance(value, str):
    # By way of float, an integer above 2^53 (a seed) would become another one.
    value = int(value) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", value) else float(value)
  if int(value) != value:
    raise ValueError
  return int(value)


def _duration(value):
  if isinstance(value, Duration):
    value = str(value)
  match = _DURATION.fullmatch(value) if isinstance(value, str) else None
  if match is None:
    raise ValueError
  unit = match[2] if match[2] == "%" else match[2].rstrip("s") + "s"
  amount = float(match[1])
  if not math.isfinite(amount):
    raise ValueError
  if unit in ("steps", "examples") and amount != int(amount):
    raise ValueError
  return Duration(amount, unit)


def _expected(options):
  words = {
    Pair: "a number of pixels or (height, width)",
    Duration: DURATION_FORMS,
    type(None): "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
  }
  texts = []
  for option in options:
    if _is_literal(option):
      texts += [repr(a) for a in typing.get_args(option)]
    else:
      texts.append(words.get(option) or str(option).replace("typing.", ""))
  return " or ".join(texts)


def _check(c: Config):
  """Refuses values that are out of range or cannot go together."""

  def need(ok, text):
    if not ok:
      raise ConfigError(text)

  positive = {
    "model.width": c.model.width,
    "model.depth": c.model.depth,
    "model.heads": c.model.heads,
    "model.mlp_ratio": c.model.mlp_ratio,
    "data.batch_size": c.data.batch_size,
    "data.eval_batch_size": c.data.eval_batch_size,
    "optim.epsilon": c.optim.epsilon,
    "optim.accumulate": c.optim.accumulate,
    "train.steps_per_call": c.train.steps_per_call,
  }
  if c.train.members_at_once is not None:
    positive["train.members_at_once"] = c.train.members_at_once
  for name, value in positive.items():
    need(value > 0, f"{name}={value} must be above 0")
  for name in ("length", "log_every", "checkpoint_every", "keep_every"):
    duration = getattr(c.train, name)
    need(
      duration is None or duration.amount > 0,
      f"train.{name}={str(duration)!r} must be above 0",
    )
  shares = {
    "model.drop_path": c.model.drop_path,
    "model.dropout": c.model.dropout,
    "loss.label_smoothing": c.loss.label_smoothing,
    "loss.mask_ratio": c.loss.mask_ratio,
    "optim.momentum": c.optim.momentum,
    "optim.second_momentum": c.optim.second_momentum,
  }
  if c.optim.ema is not None:
    shares["optim.ema"] = c.optim.ema
  for name, value in shares.items():
    need(0 <= value < 1, f"{name}={value} must be from 0 to below 1")
  need(
    0 <= c.augment.erasing <= 1,
    f"augment.erasing={c.augment.erasing} must be from 0 to 1",
  )
  not_negative = {
    "model.registers": c.model.registers,
    "data.val": c.data.val,
    "data.train_size": c.data.train_size or 0,
    "optim.lr": c.optim.lr,
    "optim.weight_decay": c.optim.weight_decay,
    "optim.clip_norm": c.optim.clip_norm or 0,
    "augment.mixup": c.augment.mixup,
    "augment.cutmix": c.augment.cutmix,
    "seed": c.seed,
  }
  for name, value in not_negative.items():
    need(value >= 0, f"{name}={value} must not be negative")
  need(
    c.train.keep is None or c.train.keep >= 1,
    f"train.keep={c.train.keep}: expected 1 or more, or None for all",
  )
  need(
    c.model.width % c.model.heads == 0,
    f"model.heads={c.model.heads} does not divide model.width={c.model.width}; try "
    f"heads in {[h for h in range(1, 65) if c.model.width % h == 0]}",
  )
  need(
    c.data.batch_size % c.optim.accumulate == 0,
    f"optim.accumulate={c.optim.accumulate} does not divide "
    f"data.batch_size={c.data.batch_size}",
  )
  if c.augment.randaugment is not None:
    operations, magnitude = c.augment.randaugment
    need(
      operations >= 1 and 0 <= magnitude <= 10,
      f"augment.randaugment={c.augment.randaugment}: expected (operations from 1, "
      "magnitude from 0 to 10)",
    )
  need(
    not (c.augment.mixup or c.augment.cutmix)
    or c.data.batch_size // c.optim.accumulate % 2 == 0,
    f"augment.mixup and cutmix pair examples: data.batch_size={c.data.batch_size} / "
    f"optim.accumulate={c.optim.accumulate} must be even",
  )
  channels = c.model.width // c.model.heads
  need(
    c.model.positions != "sincos2d" or c.model.width % 4 == 0,
    f'model.positions="sincos2d" needs model.width={c.model.width} divisible by 4',
  )
  need(
    c.model.positions != "sincos1d" or c.model.width % 2 == 0,
    f'model.positions="sincos1d" needs model.width={c.model.width} divisible by 2',
  )
  need(
    c.model.positions != "rope2d" or channels % 4 == 0,
    f'model.positions="rope2d" needs model.width / model.heads = {channels} divisible '
    "by 4",
  )
  if isinstance(c.augment.crop, tuple):
    low, high = c.augment.crop
    need(
      0 < low <= high <= 1,
      f"augment.crop={c.augment.crop}: expected shares of the area, 0 < least <= "
      "greatest <= 1",
    )
  else:
    need(c.augment.crop >= 0, f"augment.crop={c.augment.crop} must not be negative")
  need(
    not (c.train.fsdp and c.train.parallel == "pmap"),
    'train.fsdp=True needs train.parallel="jit"',
  )
  metric = c.train.best_metric
  if metric is not None:
    need(
      metric.startswith(("val/", "val_ema/")),
      f"train.best_metric={metric!r}: the best checkpoint is chosen on validation "
      'data, never on test; try "val/accuracy"',
    )
    known = ("loss",) if c.loss.name == "mae" else ("loss", "accuracy", "top5")
    measured = metric.split("/", 1)[1]
    need(
      measured in known,
      f"train.best_metric={metric!r} is not measured{nearest(measured, known)}",
    )
    need(
      c.optim.ema is not None or not metric.startswith("val_ema/"),
      f"train.best_metric={metric!r} needs optim.ema, as in optim.ema=0.999",
    )
  if c.train.halving is not None:
    rung, share = c.train.halving
    written = f"train.halving={(str(rung), share)}"
    need(
      rung.amount > 0 and 0 < share < 1,
      f"{written}: expected a rung above 0 and a share between 0 and 1",
    )
    need(c.data.val > 0, f"{written} compares on validation data; try data.val=0.1")
  _check_regex("optim.freeze", c.optim.freeze)
  for pattern, _ in c.optim.multipliers:
    _check_regex("optim.multipliers", pattern)


def _check_regex(name, pattern):
  try:
    re.compile(pattern or "")
  except re.error as error:
    raise ConfigError(
      f"{name}={pattern!r} is not a regular expression: {error}"
    ) from None

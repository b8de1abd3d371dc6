"""Starting from the parameters of another run: `config.init`.

What fits is taken exactly as it is, by name and shape; nothing is resized.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import checkpoint
from vit_jax import config as config_lib
from vit_jax.config import ConfigError
from vit_jax.data import datasets

# Where a masked autoencoder keeps the parameters of its ViT.
ENCODER = "encoder/"
# Differences that an error lists.
MOST = 12


@dataclasses.dataclass(frozen=True)
class Match:
  """Which parameters of a source fit a model, by name.

  Attributes:
    taken: same name, shape and type.
    missing: the source has none; they keep their random start.
    other: the source has another one, with the reason; they keep their random start.
    unused: the model has none.
  """

  taken: tuple[str, ...]
  missing: tuple[str, ...]
  other: Mapping[str, str]
  unused: tuple[str, ...]

  @property
  def complete(self) -> bool:
    return not (self.missing or self.other or self.unused)

  def differences(self) -> list[str]:
    """Returns a text for each parameter that does not fit."""
    return [
      *(f"missing {name}" for name in self.missing),
      *(f"extra {name}" for name in self.unused),
      *(f"{name} {reason}" for name, reason in self.other.items()),
    ]

  def table(self) -> str:
    """Returns the four groups in lines; what does not fit by name, many of one part of
    the model by their number."""
    total = len(self.taken) + len(self.missing) + len(self.other)
    lines = [f"  {'taken':<16}{len(self.taken)} of {total} parameter arrays"]
    lines += [
      f"  {'left at random':<16}{n}, missing there" for n in _by_part(self.missing)
    ]
    lines += [f"  {'left at random':<16}{n} {r}" for n, r in self.other.items()]
    lines += [f"  {'not used':<16}{n}" for n in _by_part(self.unused)]
    return "\n".join(lines)


def start_from(
  init: config_lib.Init,
  state,
  layout,
  classes: Sequence[str] | None = None,
  seeds: Sequence[int] = (),
  fingerprint: str | None = None,
):
  """Returns the state with parameters of another run, the same for all members.

  The moving average, where there is one, starts at the same parameters. Optimizer
  state and step number stay as they are: fresh.

  Args:
    init: the source and whether a part of it is enough.
    state: of `layout.init`.
    layout: of `devices.make`.
    classes: names of the classes to learn; with other names, or in another order, a
      head of the same shape is not taken. None: they are not compared.
    seeds, fingerprint: of this run and its data, to warn of images that the source was
      trained on and that this run tests on.

  Raises:
    ConfigError: no such run, or parameters that are missing, extra or of another shape
      (with `init.partial`: none that fits).
  """
  source, content, step = checkpoint.load_params(init.source)
  if fingerprint is not None and fingerprint == content["data"]["fingerprint"]:
    warning = other_split(content["config"], seeds)
    if warning and jax.process_index() == 0:
      logging.warning("init.source=%r %s", init.source, warning)
  source = checkpoint.flatten(source)
  shapes = jax.eval_shape(layout.single, state["params"])  # [S ...]
  wanted = {
    name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    for name, leaf in checkpoint.flatten(shapes).items()
  }
  was_masked = content["config"].loss.name == "mae"
  if was_masked and not any(name.startswith(ENCODER) for name in wanted):
    source = {name.removeprefix(ENCODER): leaf for name, leaf in source.items()}
  others = content["data"]["classes"]
  renamed = classes is not None and list(classes) != list(others)
  found = match(source, wanted, other_classes=renamed)
  where = f"init.source={init.source!r} (step {step})"
  if not found.taken:
    raise ConfigError(f"{where} has no parameter that fits this model")
  if not found.complete and not init.partial:
    texts = found.differences()
    listed = "; ".join(texts[:MOST])
    rest = f"; and {len(texts) - MOST} more" if len(texts) > MOST else ""
    raise ConfigError(
      f"{where} does not fit this model: {listed}{rest}. Try "
      "init.partial=True to take what fits"
    )
  if jax.process_index() == 0:
    print(f"starting from {where}:\n{found.table()}", flush=True)
  chosen = {name: np.asarray(source[name]) for name in found.taken}
  parts = {n: _filled(state[n], chosen) for n in ("params", "ema") if n in state}
  return {**state, **parts}


def other_split(source: config_lib.Config, seeds: Sequence[int]) -> str | None:
  """Says that a run on the same data with another seed has other test images, where the
  seed draws them; None where all is well."""
  others = [seed for seed in seeds if seed != source.seed]
  if not others or not (source.data.name in datasets.DRAWN_BY_SEED or source.data.val):
    return None
  return (
    f"was trained with seed {source.seed}, this run has seed {others[0]}: the seed draws "
    "which images are for testing and validation, so that it has seen some of them; try "
    f"--config.seed={source.seed}"
  )


def match(
  source: Mapping[str, Any], wanted: Mapping[str, Any], *, other_classes: bool = False
) -> Match:
  """Compares arrays (or their shapes) by name.

  Args:
    source, wanted: what has `shape` and `dtype`, by '/'-joined names.
    other_classes: the heads are for different classes, so that none fits.
  """
  other = {}
  for name in (name for name in wanted if name in source):
    has, wants = source[name], wanted[name]
    if has.shape != wants.shape:
      meaning = _meaning(name, has.shape, wants.shape)
      other[name] = f"is {tuple(has.shape)}, expected {tuple(wants.shape)}{meaning}"
    elif has.dtype != wants.dtype:
      other[name] = f"is {has.dtype}, expected {wants.dtype}"
    elif other_classes and name.startswith("head/"):
      other[name] = "is for other classes"
  return Match(
    taken=tuple(n for n in wanted if n in source and n not in other),
    missing=tuple(n for n in wanted if n not in source),
    other=other,
    unused=tuple(n for n in source if n not in wanted),
  )


def _by_part(names) -> list[str]:
  parts = {}
  for name in names:
    parts.setdefault(name.split("/")[0], []).append(name)
  return [
    text
    for part, inside in parts.items()
    for text in (inside if len(inside) <= 4 else [f"{part}/ ({len(inside)} arrays)"])
  ]


def _meaning(name, has, wants) -> str:
  """Says what another shape means in the two common cases."""
  part = name.removeprefix(ENCODER).split("/")[0]
  if part == "head" and has[:-1] == wants[:-1]:
    return " (other classes)"
  if part == "positions" and has[1:] == wants[1:]:
    return " (another grid or class token; tables are not resized)"
  return ""


def _filled(tree, chosen):
  """Puts the chosen arrays in the place of those leaves; where they lie stays.

  A leaf has the axes of members (and, with pmap, of devices) before those of the
  parameter, and all of them get the same values.
  """

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name not in chosen:
      return leaf
    values = np.broadcast_to(chosen[name], leaf.shape)
    # A copy each: the first step writes over the state in place.
    return jax.make_array_from_callback(
      leaf.shape, leaf.sharding, lambda index: np.array(values[index])
    )

  return jax.tree_util.tree_map_with_path(place, tree)

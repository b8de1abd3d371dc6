"""Checkpoints of a run folder, written and read by Orbax.

    checkpoints/{step}/arrays   the state: one array a name
    checkpoints/{step}/meta     names, shapes, types, checksums, metrics

A step counts as whole if Orbax can read it and every array has its checksum; loading
never deletes or changes anything.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from vit_jax import config as config_lib
from vit_jax import models, records
from vit_jax.config import ConfigError

FOLDER = "checkpoints"
SCHEMA = 1


class Damaged(ValueError):
  """A step whose files are missing, torn or changed."""


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which steps stay.

  Attributes:
    newest: how many of the newest; None: all.
    every: the first step that is saved at or after each multiple of this stays for
      good; None: none.
    best: metric whose best step stays (accuracy: greatest, loss: least); None: none.
  """

  newest: int | None = None
  every: int | None = None
  best: str | None = None


class Saver:
  """Saves steps in the background and drops those that need not stay.

  Every save is waited for before the next one, at `close` and on the way out of `with`;
  its error is raised there.
  """

  def __init__(self, workdir, keep: Keep):
    self.folder = records.resolve(workdir) / FOLDER
    self.keep = keep
    self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    self._scores = scores(workdir, keep.best)

  def save(self, step: int, state, meta: dict[str, Any]) -> None:
    """Starts to save a state; returns when its arrays are copied.

    Args:
      step: number of optimizer steps made.
      state: any tree of arrays.
      meta: JSON values; `meta["metrics"]` are those of this very step.

    Raises:
      FileExistsError: the step is there already.
    """
    self.wait()
    path = self.folder / str(step)
    if path.exists():
      raise FileExistsError(f"{path} exists; a step is never written twice")
    arrays = flatten(state)
    tree = {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items()}
    sums = {name: int(value) for name, value in checksums(arrays).items()}
    meta = {"schema": SCHEMA, "step": step, "tree": tree, "checksums": sums, **meta}
    meta["digest"] = _digest(meta)
    self._orbax.save(
      path,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
      ),
    )
    self._scores[step] = _score(meta["metrics"], self.keep.best)

  def beats_best(self, metrics) -> bool:
    """Whether these metrics are better than those of every step that is kept."""
    score = _score(metrics, self.keep.best)
    return score > max(self._scores.values(), default=-math.inf)

  def wait(self) -> None:
    """Waits for the running save, raises its error, and drops old steps."""
    self._orbax.wait_until_finished()
    self._orbax.check_for_errors()
    if jax.process_index() == 0:
      for step in self._superfluous():
        (self.folder / str(step)).rmtree()
        del self._scores[step]

  def close(self) -> None:
    self.wait()
    self._orbax.close()

  def _superfluous(self) -> list[int]:
    known = sorted(self._scores)
    if self.keep.newest is None:
      return []
    stay = set(known[-self.keep.newest :])
    if self.keep.every:
      firsts = {step // self.keep.every: step for step in reversed(known)}
      stay |= {step for multiple, step in firsts.items() if multiple > 0}
    best = best_step(self._scores)
    return [step for step in known if step not in stay and step != best]


def scores(workdir, metric: str | None) -> dict[int, float]:
  """Returns by step, of those whose meta data can be read, what is best when greatest."""
  folder, found = records.resolve(workdir) / FOLDER, {}
  for step in steps(workdir):
    try:
      found[step] = _score(read_meta(folder / str(step))["metrics"], metric)
    except Damaged as error:
      logging.warning("%s; it does not count for the best step", error)
  return found


def _score(metrics, name) -> float:
  """NaN and a missing metric never win."""
  value = (metrics or {}).get(name)
  if value is None or not math.isfinite(value):
    return -math.inf
  return -value if name.endswith("loss") else value


def best_step(scores: dict[int, float]) -> int | None:
  """Returns the step of the greatest finite score, the earliest of equals."""
  finite = {step: s for step, s in scores.items() if math.isfinite(s)}
  return min(finite, key=lambda step: (-finite[step], step)) if finite else None


def steps(workdir) -> list[int]:
  """Returns the saved steps in numeric order, whole or not; not Orbax's temporary ones."""
  folder = records.resolve(workdir) / FOLDER
  if not folder.exists():
    return []
  names = [p.name for p in folder.iterdir()]
  # `str` leaves out names that are no step of ours, as "007" or "²".
  return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


def flatten(tree) -> dict[str, Any]:
  """Returns the leaves by name, as in `params/block_0/attention/query/kernel`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}


def unflatten(template, arrays: dict[str, Any]):
  """Puts arrays by name into a tree of the template's structure."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(template)
  names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]
  return structure.unflatten([arrays[name] for name in names])


def checksums(arrays):
  """Returns uint32 of each array: a hash of each 32-bit word with its place (the mixing
  steps of MurmurHash3, Appleby 2008), summed modulo 2^32. Integer sums do not depend on
  how an array lies on devices."""
  # A small program for each shape compiles sooner than one for the whole tree.
  return jax.device_get(jax.tree.map(_checksum, arrays))


@jax.jit
def _checksum(array):
  bits = array
  if array.dtype == jnp.bool_:
    bits = array.astype(jnp.uint8)
  width = jnp.dtype(bits.dtype).itemsize
  words = jax.lax.bitcast_convert_type(bits, f"uint{8 * width}").astype(jnp.uint32)
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(
      jnp.uint32, words.shape, axis
    )
  mixed = words ^ (place * jnp.uint32(0x9E3779B9) + jnp.uint32(1))
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  return jnp.sum(mixed ^ (mixed >> 16))


def read_meta(path) -> dict[str, Any]:
  """Returns the meta data of one step folder.

  Raises:
    Damaged: it cannot be read.
  """
  path = epath.Path(path)
  try:
    meta = _restored(path, meta=ocp.args.JsonRestore())
  except Exception as error:
    _raise_unless_damaged(error)
    raise Damaged(f"{path} is not a whole checkpoint: {_line(error)}") from error
  if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
    raise Damaged(f"{path} is not a checkpoint of schema {SCHEMA}")
  # The first runs of this schema have no digest.
  if "digest" in meta and meta["digest"] != _digest(meta):
    raise Damaged(f"{path}: its meta data is not that which was saved")
  return meta


def _digest(meta) -> str:
  content = {name: value for name, value in meta.items() if name != "digest"}
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def restore(path, template, *, meta=None, partial_names=None):
  """Returns the state of one step folder, checked.

  Args:
    path: the step folder.
    template: a tree of arrays or `ShapeDtypeStruct`s (with shardings, where arrays are
      to lie so) that the state must match.
    meta: of `read_meta`, where it was read already.
    partial_names: names to read; None: all, and then none may be missing or extra.

  Raises:
    Damaged: files are torn or an array lacks its checksum.
    ConfigError: the state is not that of the template; lists the differences.
  """
  path = epath.Path(path)
  meta = meta or read_meta(path)
  wanted = flatten(template)
  found = meta["tree"]
  if partial_names is None:
    # Parameters first: the rest follows from them, and long lists are cut.
    differences = sorted(compare(found, wanted), key=lambda text: "params/" not in text)
    if differences:
      raise ConfigError(
        f"{path} does not fit this run: " + "; ".join(_shortened(differences))
      )
  abstract = {
    name: jax.ShapeDtypeStruct(
      tuple(shape),
      jnp.dtype(dtype),
      sharding=getattr(wanted.get(name), "sharding", None) or _here(),
    )
    for name, (dtype, shape) in found.items()
  }
  try:
    arrays = _restored(path, arrays=ocp.args.StandardRestore(abstract))
  except Exception as error:
    _raise_unless_damaged(error)
    raise Damaged(f"{path} cannot be read: {_line(error)}") from error
  for name, value in checksums(arrays).items():
    if int(value) != meta["checksums"][name]:
      raise Damaged(f"{path}: the values of {name} are not those that were saved")
  if partial_names is not None:
    return {name: arrays[name] for name in partial_names}
  return unflatten(template, arrays)


def compare(found: dict, wanted: dict) -> list[str]:
  """Returns what is missing, extra, or of another shape or type, a text each."""
  out = [f"missing {name}" for name in wanted if name not in found]
  out += [f"extra {name}" for name in found if name not in wanted]
  for name in wanted:
    if name not in found:
      continue
    dtype, shape = found[name]
    leaf = wanted[name]
    if tuple(shape) != tuple(leaf.shape):
      out.append(f"{name} is {tuple(shape)}, expected {tuple(leaf.shape)}")
    elif dtype != str(leaf.dtype):
      out.append(f"{name} is {dtype}, expected {leaf.dtype}")
  return out


def _raise_unless_damaged(error):
  """Raises what says nothing of the files again: no memory, or no right to read."""
  lacking = isinstance(error, (MemoryError, PermissionError))
  if lacking or "RESOURCE_EXHAUSTED" in str(error):
    raise error


def newest_whole(workdir, template):
  """Returns `(step, state, meta)` of the newest whole step, or None without steps.

  A damaged step is skipped with a warning that names it.
  """
  folder = records.resolve(workdir) / FOLDER
  for step in reversed(steps(workdir)):
    try:
      meta = read_meta(folder / str(step))
      return step, restore(folder / str(step), template, meta=meta), meta
    except Damaged as error:
      logging.warning("%s; trying the step before", error)
  return None


def set_aside(workdir, after: int) -> list[str]:
  """Renames the steps above `after` (damaged ones) so that they can be written anew."""
  folder = records.resolve(workdir) / FOLDER
  renamed = []
  for step in steps(workdir):
    if step > after:
      number = 0
      while (target := folder / f"{step}.damaged-{number}").exists():
        number += 1
      (folder / str(step)).rename(target)
      renamed.append(str(target))
  return renamed


def find(run, step) -> tuple[epath.Path, epath.Path]:
  """Returns the run folder and the step folder.

  Args:
    run: the run folder, or a step inside its `checkpoints/`.
    step: `"latest"`, `"best"`, or a number (also as text).

  Raises:
    ConfigError: no such run or step; names those there are.
  """
  folder = records.resolve(run)
  if folder.name.isdigit() and folder.parent.name == FOLDER:
    if str(step) not in ("latest", folder.name):
      raise ConfigError(f"{folder} is one step, so step={step!r} cannot be chosen")
    step, folder = folder.name, folder.parent.parent
  elif folder.name == FOLDER:
    folder = folder.parent
  if not (folder / "config.json").exists():
    raise ConfigError(f"{folder} is not a run folder: it has no config.json")
  known = steps(folder)
  if not known:
    raise ConfigError(f"{folder} has no checkpoints yet")
  if step == "best":
    step = _best(folder, known)
  elif step == "latest":
    step = _newest(folder, known)
  elif not str(step).isdecimal() or int(step) not in known:
    raise ConfigError(
      f"step={step!r}: expected latest, best or one of {', '.join(map(str, known))}"
    )
  return folder, folder / FOLDER / str(int(step))


def _newest(folder, known):
  for step in reversed(known):
    try:
      read_meta(folder / FOLDER / str(step))
      return step
    except Damaged as error:
      logging.warning("%s; trying the step before", error)
  raise ConfigError(f"{folder} has no whole checkpoint among steps {known}")


def _best(folder, known):
  best = read_config(folder)["config"].train.best_metric
  if best is None:
    raise ConfigError(
      f"{folder} was trained without train.best_metric, so that no step is the best; "
      "try latest"
    )
  step = best_step(scores(folder, best))
  if step is None:
    raise ConfigError(f"no step of {known} in {folder} has a finite {best}")
  return step


def read_config(folder) -> dict[str, Any]:
  """Returns config.json with `config` parsed: what a run was, with every default."""
  content = _read_record(folder, "config.json", ("config", "data"), ("external",))
  return {**content, "config": config_lib.parse(content["config"])}


def read_members(folder) -> list[dict[str, Any]]:
  """Returns name and overrides of each member, from members.json."""
  return _read_record(folder, "members.json", ("members",))["members"]


def _read_record(folder, name, filled, present=()):
  """Returns a record whose keys `filled` are there and not empty, `present` are there."""
  path = records.resolve(folder) / name
  content = records.read_json(path, SCHEMA)
  missing = [key for key in filled if not content.get(key)]
  missing += [key for key in present if key not in content]
  if missing:
    raise ConfigError(f"{path} is damaged: it has no {', '.join(missing)}")
  return content


def _member_number(folder, names, member) -> int:
  """Returns the index of a member given by number or name; None: the only one."""
  if member is None:
    if len(names) > 1:
      raise ConfigError(
        f"{folder} has {len(names)} members; choose one: {', '.join(names)}"
      )
    return 0
  if str(member) in names:
    return names.index(str(member))
  if str(member).isdigit() and int(member) < len(names):
    return int(member)
  raise ConfigError(f"member={member!r}{config_lib.nearest(str(member), names)}")


def load_params(run, *, step="latest", ema=False, member=None):
  """Returns `(params, content, step)`: the parameters of a member as a nested dict, and
  the content of config.json with the member's own configuration.

  Raises:
    ConfigError: no such run, step, member or average.
  """
  folder, path = find(run, step)
  content = read_config(folder)
  members = read_members(folder)
  number = _member_number(folder, [m["name"] for m in members], member)
  content["config"] = config_lib.override(
    content["config"], members[number]["overrides"]
  )
  if ema and content["config"].optim.ema is None:
    raise ConfigError(f"{folder} was trained without optim.ema, so it has no average")
  prefix = "ema/" if ema else "params/"
  try:
    arrays = read_arrays(path, prefix)
  except Damaged as error:
    # As a run that goes on does: the newest whole step. A step that was asked for by
    # number is that one or none.
    before = [n for n in steps(folder) if n < int(path.name)]
    if step != "latest" or records.resolve(run) == path or not before:
      raise ConfigError(str(error)) from error
    logging.warning("%s; trying the step before", error)
    path = folder / FOLDER / str(_newest(folder, before))
    try:
      arrays = read_arrays(path, prefix)
    except Damaged as error:
      raise ConfigError(str(error)) from error
  params = {}
  for name, array in arrays.items():
    *parents, leaf = name.removeprefix(prefix).split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = array[number]
  return params, content, int(path.name)


def read_arrays(path, prefix: str = "") -> dict[str, Any]:
  """Returns by name, on the host, the arrays of a step folder that begin so.

  Raises:
    Damaged: it is not whole.
  """
  meta = read_meta(path)
  names = [name for name in meta["tree"] if name.startswith(prefix)]
  return restore(path, {}, meta=meta, partial_names=names)


def load(run, *, step="latest", ema=False, member=None, model=None):
  """See `vit_jax.load`."""
  params, content, _ = load_params(run, step=step, ema=ema, member=member)
  model = model or build_model(content)
  return model, params, content["config"]


def check_parts(content, **given) -> None:
  """Refuses to do without a part that a run brought from outside the package.

  Raises:
    ConfigError: names the part that must be passed.
  """
  for name, part in given.items():
    if name in content["external"] and part is None:
      raise _needs_parts(content, name)


def _needs_parts(content, name):
  parts = ", ".join(f"{part}=..." for part in content["external"])
  return ConfigError(
    f"this run was trained with its own {name}, which no script knows; pass it from "
    f"Python: as in evaluate.run(workdir, {parts})"
  )


def build_model(content):
  """Returns the model of a run from the content of its config.json."""
  if "model" in content["external"]:
    raise _needs_parts(content, "model")
  height, width, _ = content["data"]["shape"]
  image = config_lib.Pair(height, width)
  return models.build(content["config"], image, len(content["data"]["classes"]))


def _restored(path, **item):
  """Returns what Orbax reads of the one item that is named."""
  (name,) = item
  with contextlib.closing(ocp.Checkpointer(ocp.CompositeCheckpointHandler())) as orbax:
    return orbax.restore(path, args=ocp.args.Composite(**item))[name]


def _here():
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _shortened(texts, most=8):
  rest = len(texts) - most
  return texts[:most] + ([f"and {rest} more"] if rest > 0 else [])


def _line(error) -> str:
  return (str(error) or type(error).__name__).splitlines()[0]

"""What a run would be, as text, before it begins: `python scripts/train.py --dry_run`.

Nothing of the size of the model or the data is put on a device: the training program is
compiled from shapes, and the compiler says what memory it takes.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import devices, models, optim, train
from vit_jax.data import batches
from vit_jax.models import cost
from vit_jax.tables import aligned

Rows = list[tuple[str, ...]]
BLOCK = re.compile(r"block_\d+")


def text(job: train.Job) -> str:
  """Returns the summary of a run: data, patches, parameters, cost, plan, memory."""
  state = jax.eval_shape(job.steps.init, jax.tree.map(lambda leaf: leaf[0], job.hypers))
  parts = {"data": _data(job)}
  if isinstance(getattr(job.model, "geometry", None), models.Geometry):
    parts["patches"] = _patches(job)
  parts["parameters"] = _parameters(state["params"])
  parts["parameter groups"] = groups(job, state["params"])
  if isinstance(job.model, models.ViT):
    parts["cost"] = _cost(job)
  parts["plan"] = _plan(job)
  parts["memory of the training program"] = _memory(job)
  return "\n\n".join(f"{title}\n{aligned(rows)}" for title, rows in parts.items())


def _data(job) -> Rows:
  data = job.data
  height, width, channels = job.inputs.shape
  rows = [
    ("name", data.name),
    ("images", f"{height} x {width} x {channels}"),
    ("classes", f"{len(data.classes)}"),
    ("train", f"{len(data.train):,}"),
    ("val", f"{len(data.val):,}" if data.val is not None else "none"),
    ("test", f"{len(data.test):,}"),
  ]
  if data.skipped:
    rows.append(("skipped", f"{data.skipped:,} that could not be read"))
  if data.note:
    rows.append(("note", data.note))
  return rows


def _patches(job) -> Rows:
  model, geometry = job.model.config, job.model.geometry
  coverage = geometry.coverage()
  least = int(coverage.min())
  share = (coverage == least).mean()
  extra = [] if model.pool != "cls" else ["class token"]
  extra += [f"{model.registers} registers"] if model.registers else []
  return [
    ("tokenizer", model.tokenizer),
    ("window, stride", f"{_by(geometry.patch)}, {_by(geometry.stride)}"),
    ("padding", f"{_padding(geometry.pads)} ({geometry.pad_mode})"),
    ("grid", f"{_by(geometry.grid)} = {geometry.tokens:,} patches"),
    ("tokens", " + ".join([f"{cost.tokens(model, geometry):,}: patches", *extra])),
    (
      "windows on a pixel",
      f"{least} to {coverage.max()}; {least} on {int((coverage == least).sum()):,} of "
      f"{coverage.size:,} pixels ({100 * share:.3g} %)",
    ),
  ]


def _padding(pads):
  (top, bottom), (left, right) = pads
  if not any((top, bottom, left, right)):
    return "none"
  return f"top {top}, bottom {bottom}, left {left}, right {right}"


def _by(pair):
  return f"{pair.height} x {pair.width}"


def _parameters(params) -> Rows:
  """Counts by part of the tree; blocks that are alike on one line, with their parts."""
  counts = {name: _count(tree) for name, tree in params.items()}
  blocks = [name for name in counts if BLOCK.fullmatch(name)]
  alike = len({counts[name] for name in blocks}) == 1
  rows = [
    (name, f"{count:,}", "")
    for name, count in counts.items()
    if not (alike and name in blocks)
  ]
  if alike:
    inner = {part: _count(tree) for part, tree in params[blocks[0]].items()}
    each = {f"{len(blocks)} blocks": counts[blocks[0]]}
    each |= {f"  {part}": count for part, count in inner.items()}
    rows += [(n, f"{len(blocks) * c:,}", f"{c:,} each") for n, c in each.items()]
  return [*rows, ("total", f"{sum(counts.values()):,}", "")]


def _count(tree):
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def groups(job: train.Job, params) -> Rows:
  """Returns what the optimizer does with each parameter, from the table that it uses.

  Parameters of the same name and shape in several blocks share a line where they are
  treated alike.
  """
  lines = {}  # (name, shape, treatment) -> numbers of blocks
  for row in optim.table(job.config.optim, params, job.config.model.depth):
    parts = row.name.split("/")
    blocks = [int(part[6:]) for part in parts if BLOCK.fullmatch(part)]
    name = "/".join("block_" if BLOCK.fullmatch(part) else part for part in parts)
    key = (name, row.shape, row.decayed, row.factor, row.frozen)
    lines.setdefault(key, []).extend(blocks)
  rows = [("parameter", "shape", "decayed", "lr factor")]
  for (name, shape, decayed, factor, frozen), blocks in lines.items():
    if blocks:
      name = name.replace("block_", f"block_{_ranges(blocks)}", 1)
    treatment = (
      ("frozen", "") if frozen else ("yes" if decayed else "no", f"{factor:.4g}")
    )
    rows.append((name, "x".join(map(str, shape)), *treatment))
  return rows


def _ranges(numbers):
  """Returns "0", "0..5" or "{0,2..4}"."""
  numbers, runs = sorted(numbers), []
  for number in numbers:
    if runs and number == runs[-1][1] + 1:
      runs[-1][1] = number
    else:
      runs.append([number, number])
  texts = [f"{a}..{b}" if b > a else f"{a}" for a, b in runs]
  return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def _cost(job) -> Rows:
  model, geometry = job.model.config, job.model.geometry
  channels, classes = job.inputs.shape[2], job.inputs.classes
  parts = cost.macs(model, geometry, channels, classes)
  total = sum(parts.values())
  rows = [("MACs of an image", f"{total:,}", "")]
  for name, count in parts.items():
    if count:
      rows.append((f"  {name}", f"{count:,}", f"{100 * count / total:.1f} %"))
  examples = job.schedule.total * job.config.data.batch_size * len(job.members)
  flops = cost.training_flops(model, geometry, channels, classes, examples)
  scores = cost.score_bytes(model, geometry)
  batch = job.config.data.batch_size // job.config.optim.accumulate
  return [
    *rows,
    (
      "FLOPs of training",
      f"{flops:.4g}",
      f"{examples:,} examples, forward and backward",
    ),
    ("attention scores", f"{_bytes(scores)}", f"an image, all layers, {model.dtype}"),
    ("", f"{_bytes(scores * batch)}", f"{batch} images of a step"),
  ]


def _plan(job) -> Rows:
  """Lengths, and the learning rate that the optimizer will apply."""
  schedule, size = job.schedule, job.config.data.batch_size
  examples = len(job.data.train)
  rows = [
    ("steps", f"{schedule.total:,} of {size} examples"),
    ("epochs", f"{schedule.total * size / examples:.4g} of {examples:,} examples"),
    ("micro-batches", f"{job.config.optim.accumulate} a step"),
    ("log", f"every {schedule.log:,} steps"),
    (
      "evaluate",
      f"every {schedule.evaluate:,} steps and at the end"
      if schedule.evaluate
      else "at the end",
    ),
    ("save", f"every {schedule.save:,} steps and at the end"),
  ]
  for i, member in enumerate(job.members):
    prefix = f"member {member.name}: " if len(job.members) > 1 else ""
    hyper = jax.tree.map(lambda leaf, i=i: leaf[i], job.hypers)
    rates = learning_rates(job, hyper)
    peak = int(np.argmax(rates))
    rows += [
      (f"{prefix}warm-up", f"{hyper['optim']['warmup']:,.0f} steps"),
      (f"{prefix}learning rate", f"{rates[0]:.4g} at the first step"),
      ("", f"{rates[peak]:.4g} at its peak, step {peak + 1:,}"),
      ("", f"{rates[-2]:.4g} at the last step, {schedule.total:,}"),
      ("", f"{rates[-1]:.4g} after it"),
    ]
  if job.plan.cooldown:
    rows.append(("cool-down", f"{job.plan.cooldown:,} steps"))
  return rows


def learning_rates(job: train.Job, hyper) -> np.ndarray:
  """Returns the learning rate of each step of the run and of the one after it."""
  steps = jnp.arange(job.schedule.total + 1)
  return np.asarray(optim.learning_rate(job.config.optim, job.plan, hyper, steps))


def _memory(job) -> Rows:
  """Bytes on each device, as the compiler plans them."""
  stats = memory(job)
  if stats is None:
    return [("", "this backend does not say")]
  return [
    ("arguments", _bytes(stats.argument_size_in_bytes), "state, batch, resident data"),
    ("of these, in place", _bytes(stats.alias_size_in_bytes), "the state"),
    ("outputs", _bytes(stats.output_size_in_bytes), "state, metrics"),
    ("temporary", _bytes(stats.temp_size_in_bytes), "activations, gradients"),
    (
      "at most",
      _bytes(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
      ),
      f"on each of {jax.device_count()} {jax.default_backend()} devices",
    ),
  ]


def memory(job: train.Job):
  """Returns the compiler's memory analysis of one call of the training program, or None
  where the backend has none. Compiles; allocates nothing of the run's size."""
  return compiled(job).memory_analysis()


def compiled(job: train.Job):
  """Returns the compiled training program of a run, from shapes alone."""
  config = job.config
  layout = devices.make(config, job.steps, len(job.members))
  lead = (len(job.members), config.train.steps_per_call, config.data.batch_size)
  batch = {"row": _shape(lead, np.int32), "weight": _shape(lead, np.float32)}
  splits = [data.train for data in job.datasets]
  own, shared = {}, {}
  images = splits[0].images.shape
  pixels = {"image": (images, np.uint8), "label": (images[:1], np.int32)}
  if not batches.is_resident(splits[0]):
    batch |= {
      "image": _shape((*lead, *images[1:]), np.uint8),
      "label": _shape(lead, np.int32),
    }
  else:
    batch["index"] = _shape(lead, np.int32)
    if all(split is splits[0] for split in splits):
      shared = {name: _shape(shape, dtype) for name, (shape, dtype) in pixels.items()}
    else:
      own = {
        name: _shape((len(splits), *shape), dtype)
        for name, (shape, dtype) in pixels.items()
      }
  return layout.lower(
    batch, job.hypers, own, shared, np.array([0, 1], np.int32)
  ).compile()


def _shape(shape, dtype):
  return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _bytes(count) -> str:
  """Returns a number of bytes in words, binary units."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if count < 1024 or unit == "GiB":
      return f"{count:.4g} {unit}"
    count /= 1024
  return ""

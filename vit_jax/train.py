"""The training run: restore -> [ steps -> log -> evaluate -> save ] -> test.

`run` is the whole of it. What a run is made of stands in `Job`, made once by `prepare`
(which the dry run uses too); what happens when stands in `_Loop.go`.
"""

import contextlib
import dataclasses
import logging
import math
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import (
  checkpoint,
  config,
  devices,
  evaluate,
  lock,
  losses,
  models,
  optim,
  provenance,
  records,
  steps,
)
from vit_jax.config import Config, ConfigError
from vit_jax.data import batches, datasets
from vit_jax.errors import Diverged, Stopped
from vit_jax.progress import Progress

# Settings that change no number of a run, so that a resumed run may have others.
FREE = (
  "data.dir",
  "train.keep",
  "train.keep_every",
  "train.steps_per_call",
  "train.parallel",
  "train.fsdp",
  "train.members_at_once",
)


@dataclasses.dataclass(frozen=True)
class Member:
  """One trial of a population."""

  name: str
  overrides: Mapping[str, Any]
  config: Config


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When things happen, in optimizer steps; 0: only at the end (None: never)."""

  total: int
  log: int
  evaluate: int
  save: int
  keep_every: int | None

  def next_stop(self, step: int) -> int:
    """Returns the next step after `step` at which something is due."""
    stops = [(step // n + 1) * n for n in (self.log, self.evaluate, self.save) if n]
    return min([*stops, self.total])


@dataclasses.dataclass(frozen=True)
class Job:
  """Everything that a run is made of; nothing in it changes during the run."""

  config: Config
  members: tuple[Member, ...]
  datasets: tuple[datasets.Dataset, ...]  # of each member
  model: Any
  objective: Any
  optimizer: optim.Optimizer
  plan: optim.Plan
  schedule: Schedule
  steps: steps.Steps
  hypers: Any  # of each member, stacked
  external: tuple[str, ...]  # names of the parts that came from outside

  @property
  def data(self) -> datasets.Dataset:
    return self.datasets[0]

  @property
  def inputs(self) -> steps.Inputs:
    return inputs(self.data)


def inputs(data: datasets.Dataset) -> steps.Inputs:
  """Returns what the step must know of a data set."""
  shape = tuple(int(n) for n in data.train.images.shape[1:])
  return steps.Inputs(shape, len(data.classes), data.mean, data.std)


def prepare(
  base: Config,
  *,
  members: Sequence[Mapping[str, Any]] = ({},),
  names: Sequence[str] | None = None,
  model=None,
  loss=None,
  data=None,
) -> Job:
  """Makes everything that a run is made of; refuses what cannot be.

  Args:
    base: configuration of the run.
    members: overrides of each member, dotted names, of traced settings only.
    names: of the members.
    model, loss, data: parts from outside the package, in place of the configured ones.

  Raises:
    ConfigError: settings that do not fit the data or each other.
  """
  names = names or [str(i) for i in range(len(members))]
  population = tuple(
    Member(name, dict(changes), config.override(base, changes))
    for name, changes in zip(names, members)
  )
  _check_members(base, population)
  found = _load(population, data)
  if base.train.best_metric is not None and found[0].val is None:
    raise ConfigError(
      f"train.best_metric={base.train.best_metric!r} needs validation data; try "
      "data.val=0.1"
    )
  shape = inputs(found[0])
  model = model or models.build(base, config.Pair(*shape.shape[:2]), shape.classes)
  sizes = dict(examples=len(found[0].train), batch_size=base.data.batch_size)
  total = config.steps(base.train.length, total=None, **sizes)
  if total < 1:
    raise ConfigError(f"train.length={str(base.train.length)!r} is less than one step")

  def length(duration):
    return config.steps(duration, total=total, **sizes)

  plans = [
    optim.Plan(total, length(m.config.optim.cooldown), length(m.config.optim.warmup))
    for m in population
  ]
  for plan in plans:
    optim.check_plan(plan)
  objective = loss or losses.make(base.loss)
  optimizer = optim.make(base.optim, plans[0], base.model.depth)
  hypers = [
    steps.hyper(m.config, plan.warmup, models.traceable(m.config.model))
    for m, plan in zip(population, plans)
  ]
  every = base.train.keep_every
  return Job(
    config=base,
    members=population,
    datasets=tuple(found),
    model=model,
    objective=objective,
    optimizer=optimizer,
    plan=plans[0],
    schedule=Schedule(
      total=total,
      log=max(1, length(base.train.log_every)),
      evaluate=length(base.train.eval_every),
      save=max(1, length(base.train.checkpoint_every)),
      keep_every=None if every is None else max(1, length(every)),
    ),
    steps=steps.make(base, model, objective, optimizer, shape),
    hypers=jax.tree.map(lambda *leaves: np.stack(leaves), *hypers),
    external=tuple(
      name
      for name, part in (("model", model), ("loss", loss), ("data", data))
      if part is not None and (name != "model" or not isinstance(part, models.ViT))
    ),
  )


# Settings of which each member of a population may have its own.
TRACED = (
  "seed",
  "optim.lr",
  "optim.warmup",
  "optim.weight_decay",
  "optim.clip_norm",
  "loss.label_smoothing",
  "loss.mask_ratio",
  "model.dropout",
  "model.drop_path",
  "model.scale",
  "augment.erasing",
  "augment.mixup",
  "augment.cutmix",
)


def _check_members(base, population):
  for member in population:
    for name in member.overrides:
      if name not in TRACED:
        raise ConfigError(
          f"member {member.name!r}: {name} is fixed in the program, so members cannot "
          f"differ in it; they can in {', '.join(TRACED)}"
        )
  names = [m.name for m in population]
  if len(set(names)) < len(names):
    raise ConfigError(f"names of members are not unique: {names}")
  # A part that is off in the base is left out of the program.
  for name in ("model.dropout", "model.drop_path", *TRACED[-3:]):
    for member in population:
      if config.value(member.config, name) and not config.value(base, name):
        raise ConfigError(
          f"member {member.name!r} sets {name}, which is off in the base: set it there"
        )


def _load(population, data):
  """Returns the data set of each member: one for all, or one a seed."""
  if data is not None:
    return [data] * len(population)
  by_seed = {}
  for member in population:
    seed = member.config.seed
    if seed not in by_seed:
      by_seed[seed] = datasets.load(member.config.data, seed)
  found = [by_seed[m.config.seed] for m in population]
  if len(by_seed) > 1 and not batches.is_resident(found[0].train):
    raise ConfigError("members that stream their data must share one seed")
  return found


def run(
  base: Config,
  workdir,
  *,
  members: Sequence[Mapping[str, Any]] = ({},),
  names: Sequence[str] | None = None,
  model=None,
  loss=None,
  data=None,
  wandb: str | None = None,
  profile: bool = False,
) -> dict[str, Any]:
  """Trains, or goes on with, the run in a folder, to its end.

  Args:
    base: the configuration (a `Config` or what `config.parse` takes).
    workdir: run folder, made if missing.
    members, names: a population; see `prepare`.
    model: has `init(key, images)` and `apply({"params": p}, images, keys=, hyper=)`.
    loss: an objective; see `losses`.
    data: a `datasets.Dataset`.
    wandb: name of a Weights & Biases project to log to as well.
    profile: write a trace of a few steps to `profile/`.

  Returns:
    The final metrics of each member, by name.

  Raises:
    ConfigError: settings or a folder that cannot be used.
    Stopped: SIGTERM or Ctrl-C; the state is saved, the same call goes on.
    Diverged: a loss or gradient was not finite; the last good checkpoint stays.
  """
  base = config.parse(base)
  folder = records.resolve(workdir)
  job = prepare(base, members=members, names=names, model=model, loss=loss, data=data)
  with _exclusive(folder):
    _write_identity(folder, job)
    status = records.Status(folder)
    loop = _Loop(job, folder, status)
    try:
      result = loop.go(wandb=wandb, profile=profile)
    except Stopped as stop:
      status.write("stopped", loop.step, job.schedule.total, str(stop))
      raise
    except BaseException:
      status.write("failed", loop.step, job.schedule.total, traceback.format_exc())
      raise
    status.write("done", loop.step, job.schedule.total)
    return result


def _exclusive(folder):
  """The lock of the folder, held by the first process of a run."""
  if jax.process_index() == 0:
    return lock.Lock(folder)
  return contextlib.nullcontext()


def describe(job: Job) -> dict[str, Any]:
  """Returns the content of config.json: the run with every default and its data."""
  data = job.data
  content = {
    "schema": checkpoint.SCHEMA,
    "config": config.to_dict(job.config),
    "external": list(job.external),
    "data": {
      "name": data.name,
      "shape": list(job.inputs.shape),
      "classes": list(data.classes),
      "mean": list(data.mean),
      "std": list(data.std),
      "fingerprint": data.fingerprint,
      "skipped": data.skipped,
      "note": data.note,
      "train": len(data.train),
      "val": len(data.val) if data.val else 0,
      "test": len(data.test),
    },
  }
  if isinstance(getattr(job.model, "geometry", None), models.Geometry):
    geometry = job.model.geometry
    content["geometry"] = {
      "grid": list(geometry.grid),
      "patch": list(geometry.patch),
      "stride": list(geometry.stride),
      "pads": [list(p) for p in geometry.pads],
    }
  return content


def _write_identity(folder, job):
  """Writes config.json, members.json and environment.json, or refuses another run."""
  content = describe(job)
  members = {
    "schema": checkpoint.SCHEMA,
    "members": [
      {"name": m.name, "overrides": config.plain(m.overrides)} for m in job.members
    ],
  }
  environment = provenance.environment()
  if (folder / "config.json").exists():
    _compare_identity(folder, job, content, members)
    old = records.read_json(folder / "environment.json")
    for difference in provenance.differences(old, environment):
      logging.warning("this run began with another version: %s", difference)
  if jax.process_index() == 0:
    records.write_json(folder / "config.json", content)
    records.write_json(folder / "members.json", members)
    records.write_json(folder / "environment.json", environment)


def _compare_identity(folder, job, content, members):
  old = records.read_json(folder / "config.json", checkpoint.SCHEMA)
  was, now = config.parse(old["config"]), job.config
  changed = [
    f"{name} was {config.value(was, name)!s}, is {config.value(now, name)!s}"
    for name in config.names()
    if name not in FREE and config.value(was, name) != config.value(now, name)
  ]
  old_members = records.read_json(folder / "members.json", checkpoint.SCHEMA)
  if old_members != members:
    changed.append("the members are others")
  if old["external"] != content["external"]:
    changed.append(f"parts from outside were {old['external']}")
  if changed:
    raise ConfigError(
      f"{folder} holds another run: {'; '.join(changed)}. Try another --workdir, or "
      "start from its parameters with --config.init.source"
    )
  evaluate.check_data(job.data, old["data"])


class _Loop:
  """The state of a run while it runs."""

  def __init__(self, job: Job, folder, status):
    self.job, self.folder, self.status = job, folder, status
    self.step = 0
    self.layout = devices.make(
      job.config.train, job.steps, len(job.members), job.config.data.batch_size
    )
    self.hypers = self.layout.put(job.hypers)
    self.metrics: dict[int, dict[str, float]] = {}  # last values, by member
    self.sums = _Sums()
    self.stop = None  # name of the signal that asked to stop

  def go(self, *, wandb, profile):
    job, schedule = self.job, self.job.schedule
    state, begin = self._first_state()
    self.step = begin
    keep = checkpoint.Keep(
      job.config.train.keep, schedule.keep_every, job.config.train.best_metric
    )
    names = [m.name for m in job.members]
    self.source = self._source(begin)
    with (
      _main_only(
        lambda: records.Metrics(
          self.folder, start_step=begin, members=names, wandb=wandb
        )
      ) as writer,
      contextlib.closing(checkpoint.Saver(self.folder, keep)) as saver,
      _main_only(lambda: Progress(schedule.total, begin)) as progress,
      self._signals(),
    ):
      clock = _Clock(self.step)
      tracer = _Tracer(self.folder / "profile", begin) if profile else None
      while self.step < schedule.total:
        if tracer:
          tracer.before(self.step)
        stop_at = schedule.next_stop(self.step)
        count = min(job.config.train.steps_per_call, stop_at - self.step)
        with clock.waiting():
          batch = self.source.next(self.step, count)
        state, history = self.layout.train(
          state, batch, self.hypers, *self.source.data, np.int32(count)
        )
        self.sums.add(self.step, count, history)
        self.step += count
        if tracer:
          tracer.after(self.step, state)
        self._after_call(state, writer, saver, progress, clock)
      self._check_finite(self.sums.flush())
      return self._finish(state)

  def _after_call(self, state, writer, saver, progress, clock):
    """Logs, evaluates and saves where that is due."""
    schedule, step = self.job.schedule, self.step
    end = step == schedule.total
    log = step % schedule.log == 0 or end
    test = (schedule.evaluate and step % schedule.evaluate == 0) or end
    save = step % schedule.save == 0 or end
    stopping = self._asked_to_stop()
    if not (log or test or save or stopping):
      return
    self._check_finite(self.sums.flush())
    found = [{} for _ in self.job.members]
    if log:
      found = self.sums.means()
      clock_figures = clock.figures(step, self.job.config.data.batch_size)
      found = [f | clock_figures for f in found]
    if test:
      with clock.paused():
        scores = self._evaluate(state, end)
      found = [f | s for f, s in zip(found, scores)]
    evaluated = found[0] if test else {}
    self.metrics = {i: self.metrics.get(i, {}) | f for i, f in enumerate(found)}
    if writer:
      for i, row in enumerate(found):
        if row:
          writer.write(step, row, i if len(found) > 1 else None)
    if progress:
      progress.update(step, self.metrics[0])
    better = bool(test and saver.keep.best and saver.beats_best(evaluated))
    if save or better or stopping:
      with clock.paused():
        if writer:
          writer.flush()
        meta = {"metrics": _finite(evaluated), "running": self.sums.running()}
        saver.save(step, self.layout.single(state), meta)
    self.status.write("running", step, schedule.total)
    if stopping and not end:
      saver.wait()
      raise Stopped(f"{self.stop} at step {step}; the same command goes on from there")

  def _evaluate(self, state, end: bool):
    """Returns the metrics of each member on validation data (at the end on test data
    too; without validation data on test data, for the curve only)."""
    data = self.job.datasets
    splits = {"val": [d.val for d in data]} if data[0].val is not None else {}
    if end or not splits:
      splits["test"] = [d.test for d in data]
    found = [{} for _ in data]
    size = self.job.config.data.eval_batch_size
    for suffix, name in (("", "params"), ("_ema", "ema")):
      if name not in state:
        continue
      for split, parts in splits.items():
        values = evaluate.values(self.layout, state[name], self.hypers, parts, size)
        for member, value in enumerate(values):
          for key, number in evaluate.metrics(value).items():
            found[member][f"{split}{suffix}/{key}"] = number
    return found

  def _finish(self, state):
    """Returns the last metrics by member; a finished run that is started again
    evaluates nothing it has not to."""
    if not self.metrics:
      scores = self._evaluate(state, end=True)
      self.metrics = dict(enumerate(scores))
    return {m.name: self.metrics[i] for i, m in enumerate(self.job.members)}

  def _first_state(self):
    """Returns the newest whole state of the folder, or a new one, and its step."""
    template = self.layout.abstract(self.hypers)
    found = checkpoint.newest_whole(self.folder, template)
    if found is not None:
      step, state, meta = found
      self.sums.restore(meta["running"])
      if jax.process_index() == 0:
        for name in checkpoint.set_aside(self.folder, step):
          logging.warning("a damaged step lies aside as %s", name)
      return self.layout.place(state), step
    if checkpoint.steps(self.folder):
      raise ConfigError(
        f"{self.folder} has checkpoints but none is whole; try another --workdir"
      )
    state = self.layout.init(self.hypers)
    if self.job.config.init.source is not None:
      from vit_jax import transfer

      state = transfer.start_from(self.job.config.init, state, self.layout)
    return state, 0

  def _source(self, step):
    """Returns the batches from this step on: by number where data is resident."""
    job, size = self.job, self.job.config.data.batch_size
    splits = [d.train for d in job.datasets]
    orders = [batches.Order(m.config.seed, len(splits[0])) for m in job.members]
    if batches.is_resident(splits[0]):
      return _Resident(self.layout, splits, orders, size, job.config.train)
    return _Streamed(self.layout, splits[0], orders[0], size, step, job)

  def _check_finite(self, history):
    """Raises `Diverged` at the first step whose loss or gradient is not finite."""
    for first, values in history:
      for member, k in np.argwhere(values["finite"] == 0):
        step = first + int(k)
        losses_ = float(values["loss"][member, k])
        norm = float(values["gradient_norm"][member, k])
        where = f", member {self.job.members[member].name}" if len(values) > 1 else ""
        raise Diverged(
          f"step {step + 1}{where}: loss {losses_}, gradient norm {norm} (examples "
          f"{self.source.examples(step, member)}); the last checkpoint is from before. "
          "Try a lower optim.lr, a longer optim.warmup, or optim.clip_norm"
        )

  @contextlib.contextmanager
  def _signals(self):
    """Notes SIGTERM and the first Ctrl-C; a second Ctrl-C interrupts at once."""

    def note(number, _):
      self.stop = signal.Signals(number).name
      signal.signal(signal.SIGINT, old[signal.SIGINT])

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
      old = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread: signals are its caller's business
      yield
      return
    try:
      yield
    finally:
      for number, handler in old.items():
        signal.signal(number, handler)

  def _asked_to_stop(self) -> bool:
    """Whether any process got a signal; all of them answer alike."""
    if jax.process_count() == 1:
      return self.stop is not None
    from jax.experimental import multihost_utils

    flags = multihost_utils.process_allgather(np.array(self.stop is not None))
    if flags.any() and self.stop is None:
      self.stop = "a signal to another process"
    return bool(flags.any())


class _Resident:
  """Batches as example numbers into data that lies on the device."""

  def __init__(self, layout, splits, orders, size, train):
    self._layout, self._orders, self._size = layout, orders, size
    self._steps = train.steps_per_call
    shared, own = batches.resident(splits)
    # [S n ...]: whole on every device.
    self.data = (layout.put(own) if not _is_pmap(layout) else own, layout.put(shared))
    if _is_pmap(layout) and own:
      self.data = (own, layout.put(shared))

  def next(self, step, count):
    """Returns the batches of `count` steps; always K of them, so that one program
    serves all lengths (the rest is not read)."""
    del count
    numbers = batches.index_batches(self._orders, step, self._steps, self._size)
    return self._layout.put(numbers, 2)

  def examples(self, step, member):
    numbers = batches.index_batches([self._orders[member]], step, 1, self._size)
    return numbers["index"][0, 0].tolist()


def _is_pmap(layout):
  return isinstance(layout, devices.Pmap)


class _Streamed:
  """Batches read from disk."""

  def __init__(self, layout, split, order, size, step, job):
    self._layout, self._order, self._size = layout, order, size
    self._steps = job.config.train.steps_per_call
    self._members = len(job.members)
    self.data = ({}, {})
    self._stream = batches.Stream(
      split,
      order,
      step=step,
      size=size,
      own=devices.own_rows(size),
      total=job.schedule.total,
    )

  def next(self, step, count):
    del step
    batch = self._stream.next(count)
    missing = self._steps - count

    def widened(leaf):
      """[K B ...] -> [S K B ...], K filled up to that of a full call."""
      leaf = np.pad(leaf, ((0, missing), *[(0, 0)] * (leaf.ndim - 1)))
      return np.broadcast_to(leaf, (self._members, *leaf.shape))

    return self._layout.put_own(jax.tree.map(widened, batch), 2)

  def examples(self, step, member):
    del member
    return self._order.at(step * self._size + np.arange(self._size)).tolist()


class _Sums:
  """Means of metrics since the last row, in float64, per member.

  They are saved with a checkpoint, so that a resumed run writes the row that an
  unbroken one does.
  """

  def __init__(self):
    self._pending = []
    self._totals: dict[str, list[float]] = {}
    self._count = 0

  def add(self, step, count, history):
    """Takes the metrics of a call, [S, K] each of which `count` steps were made."""
    self._pending.append((step, count, history))

  def flush(self):
    """Waits for the calls and returns [(first step, values [S, count])] of them."""
    out = []
    for step, count, history in self._pending:
      values = {n: np.asarray(v)[:, :count] for n, v in jax.device_get(history).items()}
      for name, value in values.items():
        old = self._totals.get(name, [0.0] * len(value))
        # Summed in turn: the result does not depend on how steps were cut into calls.
        self._totals[name] = [_summed(o, row) for o, row in zip(old, value)]
      self._last = {n: v[:, -1] for n, v in values.items()}
      self._count += count
      out.append((step, values))
    self._pending = []
    return out

  def means(self):
    """Returns the means by member and begins anew."""
    members = len(next(iter(self._totals.values())))
    out = [
      {
        f"train/{name}": total[i] / self._count
        for name, total in self._totals.items()
        if name != "finite"
      }
      for i in range(members)
    ]
    for i, row in enumerate(out):  # the rate of the last step, not a mean
      row["train/learning_rate"] = float(self._last["learning_rate"][i])
    self._totals, self._count = {}, 0
    return out

  def running(self):
    return {"totals": self._totals, "count": self._count}

  def restore(self, running):
    self._totals, self._count = dict(running["totals"]), running["count"]


def _summed(start, row):
  for value in row:
    start += float(value)
  return start


class _Clock:
  """Seconds of training since the last row; evaluation and saving are left out."""

  def __init__(self, step):
    self._step, self._begin = step, time.perf_counter()
    self._wait = self._pause = 0.0

  @contextlib.contextmanager
  def waiting(self):
    begin = time.perf_counter()
    yield
    self._wait += time.perf_counter() - begin

  @contextlib.contextmanager
  def paused(self):
    begin = time.perf_counter()
    yield
    self._pause += time.perf_counter() - begin

  def figures(self, step, batch_size):
    """Returns the clock figures of the steps since the last call, and begins anew."""
    now = time.perf_counter()
    seconds = max(now - self._begin - self._pause, 1e-9)
    count = max(step - self._step, 1)
    out = {
      "time/images_per_second": count * batch_size / seconds,
      "time/step": seconds / count,
      "time/data_wait": self._wait / seconds,
    }
    self._step, self._begin, self._wait, self._pause = step, now, 0.0, 0.0
    return out


class _Tracer:
  """Writes a profile of a few steps, after those that compile."""

  def __init__(self, folder, begin, skip: int = 2, steps: int = 5):
    self._folder, self._from, self._to = folder, begin + skip, begin + skip + steps
    self._running = False

  def before(self, step):
    if not self._running and self._from <= step < self._to:
      jax.profiler.start_trace(str(self._folder))
      self._running = True

  def after(self, step, state):
    if self._running and step >= self._to:
      jax.block_until_ready(state)
      jax.profiler.stop_trace()
      self._running = False
      self._to = -1


@contextlib.contextmanager
def _main_only(make):
  """Opens what only the first process writes; None elsewhere."""
  if jax.process_index() != 0:
    yield None
    return
  with make() as opened:
    yield opened


def _finite(metrics):
  return {n: v if math.isfinite(v) else None for n, v in metrics.items()}

"""The training run: restore -> [ steps -> log -> evaluate -> save ] -> test.

`run` is the whole of it. What a run is made of stands in `Job`, made once by `prepare`
(which the dry run uses too); what happens when stands in `loop.Loop.go`.
"""

import contextlib
import dataclasses
import logging
import math
import signal
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import (
  checkpoint,
  config,
  evaluate,
  lock,
  losses,
  models,
  optim,
  provenance,
  records,
  signals,
  steps,
)
from vit_jax.config import Config, ConfigError
from vit_jax.data import batches, datasets
from vit_jax.errors import Stopped
from vit_jax.loop import Loop

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
# Settings of which each member of a population may have its own.
TRACED = (
  "seed",
  "optim.lr",
  "optim.warmup",
  "optim.weight_decay",
  "optim.clip_norm",
  "loss.label_smoothing",
  "model.dropout",
  "model.drop_path",
  "model.scale",
  "augment.erasing",
  "augment.mixup",
  "augment.cutmix",
)
# Of these, what is left out of the program where it is 0.
LEFT_OUT = (
  "model.dropout",
  "model.drop_path",
  "augment.erasing",
  "augment.mixup",
  "augment.cutmix",
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
  rungs: Mapping[int, int]  # after which step how many members go on

  def next_stop(self, step: int) -> int:
    """Returns the next step after `step` at which something is due."""
    stops = [(step // n + 1) * n for n in (self.log, self.evaluate, self.save) if n]
    return min([*stops, *(r for r in self.rungs if r > step), self.total])


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
  given = {"model": model, "loss": loss, "data": data}
  trials = population(base, members, names)
  found = _load(trials, data)
  if base.train.best_metric is not None and found[0].val is None:
    raise ConfigError(
      f"train.best_metric={base.train.best_metric!r} needs validation data; try "
      "data.val=0.1"
    )
  best = base.train.best_metric or ""
  if best.endswith("/top5") and len(found[0].classes) <= 5:
    raise ConfigError(
      f"train.best_metric={best!r} needs more than 5 classes, this data has "
      f"{len(found[0].classes)}; try val/accuracy"
    )
  if base.init.partial and base.init.source is None:
    logging.warning(
      "init.partial=True, but init.source=None: the run starts from random parameters"
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
    for m in trials
  ]
  for plan in plans:
    optim.check_plan(plan)
  objective = loss or losses.make(base.loss)
  optimizer = optim.make(base.optim, plans[0], base.model.depth)
  hypers = [
    steps.hyper(m.config, plan.warmup, models.traceable(m.config.model))
    for m, plan in zip(trials, plans)
  ]
  every = base.train.keep_every
  return Job(
    config=base,
    members=trials,
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
      rungs=_rungs(base.train.halving, length, total, len(trials)),
    ),
    steps=steps.make(base, model, objective, optimizer, shape),
    hypers=jax.tree.map(lambda *leaves: np.stack(leaves), *hypers),
    external=tuple(name for name, part in given.items() if part is not None),
  )


def _rungs(halving, length, total, members):
  """Returns how many members go on after which step (Jamieson & Talwalkar 2016)."""
  rungs = {}
  if halving is None:
    return rungs
  first, share = halving
  step, left = max(1, length(first)), members
  while step < total and left > 1:
    left = max(1, math.ceil(left * share - 1e-9))
    rungs[step] = left
    step = max(step + 1, round(step / share))
  return rungs


def population(
  base: Config,
  members: Sequence[Mapping[str, Any]],
  names: Sequence[str] | None = None,
) -> tuple[Member, ...]:
  """Returns the members of a run; see `prepare`.

  Raises:
    ConfigError: overrides of what is fixed in the program, or names that are not unique.
  """
  names = names or [str(i) for i in range(len(members))]
  trials = tuple(
    Member(name, dict(changes), config.override(base, changes))
    for name, changes in zip(names, members)
  )
  _check_members(base, trials)
  return trials


def _check_members(base, trials):
  for member in trials:
    for name in member.overrides:
      if name not in TRACED:
        raise ConfigError(
          f"member {member.name!r}: {name} is fixed in the program, so members cannot "
          f"differ in it; they can in {', '.join(TRACED)}"
        )
  names = [m.name for m in trials]
  if len(set(names)) < len(names):
    raise ConfigError(f"names of members are not unique: {names}")
  if base.train.best_metric is not None and len(trials) > 1:
    raise ConfigError(
      f"train.best_metric={base.train.best_metric!r} is for one member: all members are "
      "saved together, and their best steps differ; try train.keep"
    )
  # A part that is off in the base is left out of the program.
  for name in LEFT_OUT:
    for member in trials:
      if config.value(member.config, name) and not config.value(base, name):
        raise ConfigError(
          f"member {member.name!r} sets {name}, which is off in the base: set it there"
        )


def _load(trials, data):
  """Returns the data set of each member: one for all, or one a seed."""
  by_seed = {}
  for member in trials:
    seed = member.config.seed
    if seed not in by_seed:
      by_seed[seed] = data or datasets.load(member.config.data, seed)
  found = [by_seed[m.config.seed] for m in trials]
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
    Stopped: SIGTERM or Ctrl-C; what there was to save is saved, the same call goes on.
    Diverged: a loss or gradient was not finite; the last good checkpoint stays.
  """
  base = config.parse(base)
  folder = records.resolve(workdir)
  with contextlib.ExitStack() as stack:
    stack.enter_context(signals.handled(_stop_at_once, signal.SIGTERM))
    job = prepare(base, members=members, names=names, model=model, loss=loss, data=data)
    stack.enter_context(_exclusive(folder))
    _write_identity(folder, job)
    status = records.Status(folder, main=jax.process_index() == 0)
    loop = Loop(job, folder, status)
    status.write("running", loop.step, job.schedule.total)
    try:
      result = loop.go(wandb=wandb, profile=profile)
    except (Stopped, KeyboardInterrupt) as stop:
      status.write("stopped", loop.step, job.schedule.total, str(stop) or "Ctrl-C")
      raise
    except BaseException:
      status.write("failed", loop.step, job.schedule.total, traceback.format_exc())
      raise
    status.write("done", loop.step, job.schedule.total)
    return result


def _stop_at_once(name):
  """What SIGTERM does before the steps and after them: there is nothing to save."""
  raise Stopped(f"{name} outside the steps; the same command goes on")


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
  # A run that failed before its first checkpoint has nothing that another would mix with.
  if (folder / "config.json").exists() and checkpoint.steps(folder):
    _compare_identity(folder, job, content, members)
    _compare_versions(folder, environment)
  if jax.process_index() == 0:
    # config.json last: where it is, the others are.
    records.write_json(folder / "members.json", members)
    records.write_json(folder / "environment.json", environment)
    records.write_json(folder / "config.json", content)


def _compare_versions(folder, environment):
  """Warns of other versions; the file only informs, so that a run goes on without it."""
  try:
    old = records.read_json(folder / "environment.json")
  except (ConfigError, FileNotFoundError) as error:
    logging.warning("%s; it is written anew", error)
    return
  for difference in provenance.differences(old, environment):
    logging.warning("this run began with another version: %s", difference)


def _described(members) -> str:
  return ", ".join(f"{m['name']} {m['overrides']}" for m in members)


def differences(was: Config, now: Config) -> list[str]:
  """Returns in words which settings that change numbers are others now."""
  return [
    f"{name} was {config.value(was, name)!s}, is {config.value(now, name)!s}"
    for name in config.names()
    if name not in FREE and config.value(was, name) != config.value(now, name)
  ]


def _compare_identity(folder, job, content, members):
  old = checkpoint.read_config(folder)
  was, now = old["config"], job.config
  changed = differences(was, now)
  old_members = checkpoint.read_members(folder)
  if old_members != members["members"]:
    changed.append(
      f"members were {_described(old_members)}, are {_described(members['members'])}"
    )
  if old["external"] != content["external"]:
    changed.append(f"parts from outside were {old['external']}")
  if changed:
    raise ConfigError(
      f"{folder} holds another run: {'; '.join(changed)}. Try another --workdir, or "
      "start from its parameters with --config.init.source"
    )
  evaluate.check_data(job.data, old["data"])

"""A sweep in a folder: written down, run group by group, looked at while it runs.

    sweep.json      base configuration, groups and their trials
    groups/{id}/    the run folder of each group

What has been done is read from the run folders alone, so that a sweep may be killed at
any moment and its groups may run anywhere that sees the folder.
"""

import dataclasses
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import checkpoint, lock, models, records, train
from vit_jax.config import Config, ConfigError
from vit_jax.data import batches, datasets
from vit_jax.errors import Stopped
from vit_jax.models import cost
from vit_jax.sweep import plan

FILE = "sweep.json"
# Of a group. "killed": it says that it runs, but no process holds its folder.
STATES = ("waiting", "running", "killed", "stopped", "failed", "done")


def make(
  folder, base: Config, space: Sequence[Mapping[str, Any]], write: bool = True
) -> list[plan.Group]:
  """Returns the groups of a sweep, those that its folder has already among them.

  Args:
    folder: of the sweep; None: of none.
    base: configuration that the trials change.
    space: the trials, see `space`.
    write: write sweep.json.

  Raises:
    ConfigError: settings that cannot be, or a folder that holds another sweep.
  """
  chosen = plan.trials(base, space)
  path = None if folder is None else records.resolve(folder) / FILE
  old = []
  if path is not None and path.exists():
    old = read(folder)
  streams = any(_streams(trial.config) for trial in _one_a_set(chosen))
  groups = [_with_facts(g) for g in plan.extended(old, chosen, streams)]
  if write and groups != old:
    records.write_json(path, plan.to_json(base, groups))
  return groups


def read(folder) -> list[plan.Group]:
  """Returns the groups of a sweep from its folder.

  Raises:
    FileNotFoundError: no sweep there.
    ConfigError: sweep.json is damaged or of another version.
  """
  path = records.resolve(folder) / FILE
  if not path.exists():
    raise FileNotFoundError(
      f"no {FILE} in {os.fspath(path.parent)}; expected the folder of a sweep"
    )
  return plan.from_json(records.read_json(path, plan.SCHEMA))[1]


def _one_a_set(trials):
  """Returns a trial of each data set."""
  return {trial.config.data: trial for trial in trials}.values()


def _streams(config):
  return not batches.is_resident(datasets.load(config.data, config.seed).train)


def _with_facts(group):
  """Adds what a member costs; refuses what cannot run, before anything does."""
  train.population(group.base, group.members, group.names)
  if group.facts:
    return group
  job = train.prepare(group.base)
  facts = {"steps": job.schedule.total}
  if isinstance(job.model, models.ViT):
    model, geometry = job.model.config, job.model.geometry
    described = (model, geometry, job.inputs.shape[2], job.inputs.classes)
    examples = job.schedule.total * job.config.data.batch_size
    facts |= {
      "tokens": cost.tokens(model, geometry),
      "parameters": sum(cost.parameters(*described).values()),
      "macs": sum(cost.macs(*described).values()),
      "flops": cost.training_flops(*described, examples),
    }
  return dataclasses.replace(group, facts=facts)


def run_group(folder, name: str) -> dict[str, Any]:
  """Trains one group of a sweep, or goes on with it.

  Args:
    folder: of the sweep.
    name: id of the group.

  Returns:
    The final metrics of each trial, by name.

  Raises:
    ConfigError: no such group, or its folder is in use.
    Stopped, Diverged: see `train.run`.

  A group that is done keeps its last checkpoint and, with `train.best_metric`, its best;
  with `train.keep_every`, what that keeps.
  """
  groups = {group.id: group for group in read(folder)}
  if name not in groups:
    raise ConfigError(f"--group={name}: expected one of {', '.join(groups)}")
  group, place = groups[name], run_folder(folder, name)
  try:
    found = train.run(group.base, place, members=group.members, names=group.names)
  except (Stopped, lock.FolderInUse):
    raise
  except Exception:
    note_failure(place, traceback.format_exc())
    raise
  if group.base.train.keep_every is None:
    keep = checkpoint.Keep(newest=1, best=group.base.train.best_metric)
    checkpoint.Saver(place, keep).close()  # drops the others
  return found


def run_folder(folder, name: str):
  """Returns the run folder of a group."""
  return records.resolve(folder) / "groups" / name


def note_failure(place, text: str) -> None:
  """Writes into a run folder that the run failed, unless it has done so itself."""
  status = records.read_status(place)
  if status is None or status["state"] != "failed":
    step, total = (status["step"], status["total"]) if status else (0, 0)
    records.Status(place).write("failed", step, total, text)


def state(folder, group: plan.Group) -> dict[str, Any]:
  """Returns `state` (one of `STATES`), `step`, `total`, `message` and `ended` of a
  group."""
  place = run_folder(folder, group.id)
  total = group.facts["steps"]
  status = records.read_status(place)
  if status is None:
    running = lock.holder(place) is not None
    return {
      "state": "running" if running else "waiting",
      "step": 0,
      "total": total,
      "message": "",
      "ended": {},
    }
  name = status["state"]
  if name == "running" and lock.holder(place) is None:
    name = "killed"
  kept = {key: status[key] for key in ("step", "message", "ended")}
  return {"state": name, "total": total, **kept}


def command(script: str, folder, name: str) -> list[str]:
  """Returns the command line that runs one group, from anywhere."""
  return [
    sys.executable,
    os.path.abspath(script),
    f"--workdir={os.fspath(records.resolve(folder))}",
    f"--group={name}",
  ]

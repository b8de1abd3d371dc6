"""What the trials of a sweep came to, read from its run folders."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import config, records
from vit_jax.config import ConfigError
from vit_jax.sweep import launch, plan
from vit_jax.sweep.space import ARM

DONE = "done"


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Of one trial.

  Attributes:
    trial: what it was.
    group: id of its group, `groups/{group}` is its run folder.
    facts: of its group: steps, tokens, parameters, macs, flops.
    state: "done", "diverged", "dropped", or the state of its group (`launch.STATES`).
    message: why it is not done.
    rows: of metrics.jsonl, its own.
    seconds: that its steps took, its share of those of the group.
  """

  trial: plan.Trial
  group: str
  facts: Mapping[str, Any]
  state: str
  message: str
  rows: Sequence[Mapping[str, Any]]
  seconds: float

  def final(self, metric: str) -> float | None:
    """Returns the last value of a metric of a trial that is done, None of another."""
    if self.state != DONE:
      return None
    values = [row[metric] for row in self.rows if metric in row]
    return values[-1] if values else None

  def curve(self, metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each row that has this metric."""
    return [(row["step"], row[metric]) for row in self.rows if metric in row]

  def setting(self, name: str) -> Any:
    """Returns its value of a setting, or the name of its arm."""
    if name == ARM:
      return self.trial.arm
    return config.value(self.trial.config, name)


def read(folder) -> list[Outcome]:
  """Returns the outcome of each trial, in the order of the sweep."""
  return [
    outcome for group in launch.read(folder) for outcome in _of_group(folder, group)
  ]


def _of_group(folder, group):
  place = launch.run_folder(folder, group.id)
  state = launch.state(folder, group)
  rows = rows_of(place)
  steps = [state["ended"].get(n, {}).get("step", state["step"]) for n in group.names]
  a_step = seconds(rows) / (sum(steps) or 1)
  for number, trial in enumerate(group.trials):
    ended = state["ended"].get(trial.name)
    yield Outcome(
      trial=trial,
      group=group.id,
      facts=group.facts,
      state=ended["reason"] if ended else state["state"],
      message=ended["message"] if ended else state["message"],
      rows=[row for row in rows if row.get("member", 0) == number],
      seconds=a_step * steps[number],
    )


def rows_of(place) -> list[dict[str, Any]]:
  """Returns the rows of a run folder, none where it has not begun."""
  try:
    return records.read(place)
  except FileNotFoundError:
    return []


def seconds(rows: Sequence[Mapping[str, Any]]) -> float:
  """Returns the seconds that a run has spent on steps, of all its members together."""
  times = {row["step"]: row["time/step"] for row in rows if "time/step" in row}
  total, before = 0.0, 0
  for step in sorted(times):
    total, before = total + (step - before) * times[step], step
  return total


def check_metric(
  outcomes: Sequence[Outcome], metric: str, flag: str = "metric"
) -> None:
  """Refuses a metric that no trial has."""
  known = sorted(
    {name for o in outcomes for row in o.rows for name in row if "/" in name}
  )
  if outcomes and metric not in known:
    raise ConfigError(f"--{flag}={metric}{config.nearest(metric, known)}")


def arms(
  outcomes: Sequence[Outcome], by: Sequence[str]
) -> dict[tuple[Any, ...], list[Outcome]]:
  """Returns the outcomes by their values of some settings (or "arm").

  Raises:
    ConfigError: no such setting.
  """
  known = [*config.names(), ARM]
  for name in by:
    if name not in known:
      raise ConfigError(f"{name!r} is no setting{config.nearest(name, known)}")
  found = {}
  for outcome in outcomes:
    found.setdefault(tuple(outcome.setting(n) for n in by), []).append(outcome)
  return found


@dataclasses.dataclass(frozen=True)
class Choice:
  """The value of a tuned setting that an arm is judged with.

  Attributes:
    value: the chosen one.
    tried: all of them, in the order of the sweep.
    mean: of the metric that chose, over the trials of that value.
  """

  value: Any
  tried: tuple[Any, ...]
  mean: float


def tuned(
  outcomes: Sequence[Outcome], by: Sequence[str], setting: str, metric: str
) -> tuple[list[Outcome], dict[tuple[Any, ...], Choice]]:
  """Keeps of each arm the trials of the value of a setting that did best.

  Args:
    outcomes: of a sweep.
    by: settings (or "arm") that make an arm.
    setting: that was tuned.
    metric: that chooses, by its mean over trials; the least where it ends in "loss".
      A value of which no trial is done is not chosen.

  Returns:
    The outcomes that are left, and the choice of each arm that has one; of an arm that
    has none, all are left.

  Raises:
    ConfigError: no such setting.
  """
  chosen = {}
  kept = set()
  for arm, members in arms(outcomes, by).items():
    found = {value: part for (value,), part in arms(members, (setting,)).items()}
    means = {}
    for value, part in found.items():
      finals = [f for f in (o.final(metric) for o in part) if f is not None]
      if finals:
        means[value] = sum(finals) / len(finals)
    if not means:
      kept.update(map(id, members))
      continue
    best = (min if metric.endswith("loss") else max)(means, key=means.get)
    chosen[arm] = Choice(best, tuple(found), means[best])
    kept.update(map(id, found[best]))
  return [o for o in outcomes if id(o) in kept], chosen


def by_pair(outcomes: Sequence[Outcome], pair: str, metric: str) -> dict[Any, float]:
  """Returns the final value of each trial of an arm that is done, by its `pair`.

  Raises:
    ConfigError: two trials have the same.
  """
  found, owners = {}, {}
  for outcome in outcomes:
    key = outcome.setting(pair)
    if key in owners:
      raise ConfigError(
        f"trials {owners[key]!r} and {outcome.trial.name!r} are of one arm and have the "
        f"same {pair}; name what they differ in by --by or --within"
      )
    owners[key] = outcome.trial.name
    value = outcome.final(metric)
    if value is not None:
      found[key] = value
  return found

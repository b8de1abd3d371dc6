"""A search in place of a grid: Optuna proposes the trials (extra `optuna`).

The proposals and their values lie in `optuna.db` of the sweep's folder, where
`optuna-dashboard sqlite:///runs/NAME/optuna.db` finds them. Trials that are proposed
together are members of one population wherever they can be.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax import records
from vit_jax.config import Config, ConfigError
from vit_jax.sweep import launch, plan, results
from vit_jax.sweep.space import Range

FILE = "optuna.db"


@dataclasses.dataclass(frozen=True)
class Search:
  """What get_sweep() of a file returns in place of trials.

  Attributes:
    ranges: of the settings: a range (`space.log_uniform`, …) or a list of choices.
    trials: in all.
    at_once: proposed together, with the values of all before them known.
    metric: what is to be best, on validation data; of a loss the least, otherwise the
      greatest.
    seed: of the proposals.
  """

  ranges: Mapping[str, Range | list[Any]]
  trials: int
  at_once: int = 8
  metric: str = "val/accuracy"
  seed: int = 0


def run(folder, base: Config, search: Search, go: Callable[[], list[str]]) -> list[str]:
  """Proposes and runs trials until all are done; goes on where it was stopped.

  Args:
    folder: of the sweep.
    base: configuration that the trials change.
    search: what is searched.
    go: runs what is missing of the sweep and returns the groups that failed.

  Returns:
    The groups that failed.

  Raises:
    ConfigError: Optuna is missing, or the metric is of test data.
  """
  try:
    import optuna
  except ImportError:
    raise ConfigError("Optuna is missing; pip install -e '.[optuna]'") from None
  if not search.metric.startswith("val"):
    raise ConfigError(
      f"metric={search.metric!r}: a search selects, so it needs a validation metric; "
      "try val/accuracy"
    )
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  place = records.resolve(folder)
  place.mkdir(parents=True, exist_ok=True)
  study = optuna.create_study(
    storage=f"sqlite:///{os.fspath(place / FILE)}",
    study_name=place.name,
    direction="minimize" if search.metric.endswith("loss") else "maximize",
    load_if_exists=True,
  )
  failed = []
  while True:
    if study.trials:
      launch.make(folder, base, _space(study))
      failed = go()
      _tell(optuna, folder, base, study, search.metric)
    missing = search.trials - len(study.trials)
    if missing <= 0:
      return failed
    # Anew each time, so that a search that was stopped proposes what an unbroken one
    # does.
    study.sampler = optuna.samplers.TPESampler(
      seed=search.seed + len(study.trials), constant_liar=True
    )
    for _ in range(min(missing, search.at_once)):
      trial = study.ask()
      for name, values in search.ranges.items():
        _suggest(trial, name, values)


def _suggest(trial, name, values):
  if not isinstance(values, Range):
    return trial.suggest_categorical(name, list(values))
  kind = trial.suggest_int if values.whole else trial.suggest_float
  return kind(name, values.low, values.high, log=values.log)


def _space(study):
  """Returns what was proposed so far, each once, in its order."""
  found = []
  for trial in study.trials:
    if trial.params not in found:
      found.append(trial.params)
  return found


def _tell(optuna, folder, base, study, metric):
  """Gives Optuna the values of the trials that it waits for."""
  outcomes = {o.trial.config: o for o in results.read(folder)}
  state = optuna.trial.TrialState
  for trial in study.get_trials(states=(state.RUNNING,)):
    (wanted,) = plan.trials(base, [trial.params])
    outcome = outcomes[wanted.config]
    value = outcome.final(metric)
    if value is not None:
      study.tell(trial.number, value)
      continue
    ended = state.PRUNED if outcome.state == "dropped" else state.FAIL
    study.tell(trial.number, state=ended)

"""A search by Optuna over the same settings."""

import pytest
import tiny

from vit_jax.config import ConfigError
from vit_jax.errors import Diverged
from vit_jax.sweep import launch, results, search, space

optuna = pytest.importorskip("optuna")


def wanted(**changes):
  ranges = {
    "optim.lr": space.log_uniform(1e-4, 1e-1),
    "model.depth": space.integers(1, 2),
    "model.pool": ["cls", "mean"],
  }
  return search.Search(ranges, **{"trials": 6, "at_once": 3, **changes})


def run_all(folder):
  failed = []
  for group in launch.read(folder):
    if launch.state(folder, group)["state"] != "done":
      try:
        launch.run_group(folder, group.id)
      except Diverged:
        failed.append(group.id)
  return failed


def study_of(folder):
  return optuna.load_study(
    study_name=folder.name, storage=f"sqlite:///{folder / search.FILE}"
  )


BASE = {"data__val": 0.2, "train__length": "4 steps", "optim__warmup": "1 step"}


def test_the_values_that_optuna_has_are_those_of_the_runs(tmp_path):
  assert (
    search.run(tmp_path, tiny.make(**BASE), wanted(), lambda: run_all(tmp_path)) == []
  )
  trials = study_of(tmp_path).trials
  assert len(trials) == 6
  outcomes = results.read(tmp_path)
  found = {
    (o.setting("optim.lr"), o.setting("model.depth"), o.setting("model.pool")): o.final(
      "val/accuracy"
    )
    for o in outcomes
  }
  assert len(found) == 6
  for trial in trials:
    assert found[tuple(trial.params.values())] == trial.value


def test_a_search_that_was_stopped_proposes_what_an_unbroken_one_does(tmp_path):
  base = tiny.make(**BASE)
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  asked = search.Search({"optim.lr": space.log_uniform(1e-4, 1e-1)}, 6, at_once=3)
  search.run(whole, base, asked, lambda: run_all(whole))
  calls = []

  def stops():
    calls.append(1)
    if len(calls) == 1:
      raise KeyboardInterrupt  # trials are proposed, none has run
    return run_all(broken)

  with pytest.raises(KeyboardInterrupt):
    search.run(broken, base, asked, stops)
  search.run(broken, base, asked, stops)
  a, b = (
    [(t.params, t.value) for t in study_of(folder).trials] for folder in (whole, broken)
  )
  assert a == b


def test_a_trial_that_diverges_has_failed(tmp_path):
  base = tiny.make(**BASE, optim__name="sgd", optim__clip_norm=None)
  ranges = {"optim.lr": [1e-3, 1e30]}
  wild = search.Search(ranges, trials=8, at_once=8)
  search.run(tmp_path, base, wild, lambda: run_all(tmp_path))
  states = {t.params["optim.lr"]: t.state.name for t in study_of(tmp_path).trials}
  assert states == {1e-3: "COMPLETE", 1e30: "FAIL"}


def test_a_search_does_not_select_on_test_data(tmp_path):
  with pytest.raises(ConfigError, match="needs a validation metric"):
    search.run(tmp_path, tiny.make(), wanted(metric="test/accuracy"), list)

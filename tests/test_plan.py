"""Trials, their names, and the programs that they share."""

import pytest
import tiny

from vit_jax import config, train
from vit_jax.config import ConfigError
from vit_jax.sweep import plan, space
from vit_jax.sweep.space import arm, chain, grid, product


def names(*spaces):
  return [t.name for t in plan.trials(tiny.make(), product(*spaces))]


def test_each_trial_differs_from_the_base_by_its_overrides_exactly():
  base = tiny.make()
  trials = plan.trials(
    base, product(grid("model.pool", ["cls", "mean"]), grid("model.patch", [2, 4]))
  )
  assert len(trials) == 4
  for trial in trials:
    changed = {
      name: config.value(trial.config, name)
      for name in config.names()
      if config.value(trial.config, name) != config.value(base, name)
    }
    expected = {n: config.value(trial.config, n) for n in trial.overrides}
    assert changed.items() <= expected.items()
    assert set(trial.overrides) == {"model.pool", "model.patch"}
  pairs = [(t.config.model.pool, t.config.model.patch.height) for t in trials]
  assert pairs == [("cls", 2), ("cls", 4), ("mean", 2), ("mean", 4)]


def test_names_are_readable_and_of_the_trial_alone():
  assert names(grid("optim.lr", [0.1, 3e-4]), grid("seed", [0])) == [
    "lr=0.1,seed=0",
    "lr=0.0003,seed=0",
  ]
  assert names(grid("model.patch", [(2, 4), 2])) == ["patch=2x4", "patch=2"]
  # Settings of several groups end in "name".
  assert names(grid("optim.name", ["sgd"])) == ["optim.name=sgd"]
  assert names(grid("train.length", ["5 steps"])) == ["length=5_steps"]
  assert names(grid("optim.clip_norm", [None])) == ["clip_norm=None"]
  arms = chain(arm("P2", {"model.patch": 2}), arm("P4", {"model.patch": 4}))
  assert names(arms, grid("seed", [3])) == ["P2,seed=3", "P4,seed=3"]
  more = plan.trials(tiny.make(), product(arms, grid("seed", [3, 4])))
  assert {"P2,seed=3", "P4,seed=3"} < {t.name for t in more}


@pytest.mark.parametrize(
  "trials, words",
  [
    (grid("model.drpout", [0.1]), "trial 0 .*did you mean"),
    (grid("model.pool", ["cls", "avgg"]), "trial 1 .*model.pool='avgg'"),
    (grid("optim.lr", [0.1, 0.10]), "are the same"),
    (grid("model.patch", [2, (2, 2)]), "are the same"),
    (chain(arm("a", {"seed": 1}), arm("a", {"seed": 2})), "two arms are called 'a'"),
    ([], "no trials"),
  ],
)
def test_a_space_that_cannot_be_is_refused_whole(trials, words):
  with pytest.raises(ConfigError, match=words):
    plan.trials(tiny.make(), trials)


def test_trials_of_one_program_are_members_of_one_group():
  trials = plan.trials(
    tiny.make(),
    product(
      grid("model.patch", [2, 4]),
      grid("optim.lr", [0.1, 0.2]),
      grid("model.dropout", [0.0, 0.1, 0.2]),
      grid("seed", [0, 1]),
    ),
  )
  groups = plan.groups(trials)
  # Dropout of 0 is another program than a rate above.
  assert sorted(len(g.trials) for g in groups) == [4, 4, 8, 8]
  assert len({g.id for g in groups}) == 4
  for group in groups:
    members = train.population(group.base, group.members, group.names)
    assert [m.config for m in members] == [t.config for t in group.trials]
  assert sorted(t.name for g in groups for t in g.trials) == sorted(
    t.name for t in trials
  )
  alone = plan.groups(trials, one_seed=True)
  assert all(len({t.config.seed for t in g.trials}) == 1 for g in alone)


def test_what_is_written_is_read_back():
  base = tiny.make()
  arms = chain(arm("A", {"optim.lr": 0.5}), arm("B", {"optim.warmup": "3 steps"}))
  groups = plan.groups(plan.trials(base, product(arms, grid("seed", [0, 1]))))
  assert plan.from_json(plan.to_json(base, groups)) == (base, groups)


def test_a_sweep_grows_but_does_not_change():
  base = tiny.make()
  old = plan.groups(plan.trials(base, grid("optim.lr", [0.1, 0.2])))
  more = plan.trials(base, grid("optim.lr", [0.1, 0.2, 0.3]))
  grown = plan.extended(old, more, one_seed=False)
  assert grown[:1] == old and [t.name for t in grown[1].trials] == ["lr=0.3"]
  with pytest.raises(ConfigError, match=r"trial 'lr=0.2' is gone"):
    plan.extended(old, more[:1], one_seed=False)
  other = plan.trials(tiny.make(model__depth=3), grid("optim.lr", [0.1, 0.2]))
  with pytest.raises(ConfigError, match=r"'lr=0.1': model.depth was 2, is 3"):
    plan.extended(old, other, one_seed=False)
  # A setting that changes no number may change.
  free = plan.trials(tiny.make(train__keep=7), grid("optim.lr", [0.1, 0.2]))
  assert plan.extended(old, free, one_seed=False) == old


def test_every_point_of_a_sample_is_a_trial():
  ranges = {"optim.lr": space.log_uniform(1e-4, 1e-1)}
  trials = plan.trials(tiny.make(), space.sample(50, ranges, seed=0))
  (group,) = plan.groups(trials)
  assert len(group.trials) == 50

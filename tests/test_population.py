"""Members that end before the others: diverged, or dropped by successive halving."""

import shutil

import jax
import numpy as np
import pytest
import tiny

from vit_jax import checkpoint, population, records, train
from vit_jax.config import ConfigError
from vit_jax.errors import Diverged

WILD = 1e30  # a learning rate that ends any run


def states(folder):
  """Returns the newest state of a run, by name, [S ...]."""
  step = checkpoint.steps(folder)[-1]
  return checkpoint.read_arrays(folder / "checkpoints" / str(step))


def sgd(**changes):
  return tiny.make(
    optim__name="sgd", optim__clip_norm=None, optim__warmup="0 steps", **changes
  )


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_member_that_diverges_is_frozen_and_touches_no_other(tmp_path, at_once):
  cfg = sgd(train__members_at_once=at_once, train__log_every="1 step")
  members = [{"optim.lr": 1e-2}, {"optim.lr": WILD}, {"optim.lr": 3e-3}]
  names = ["calm", "wild", "slow"]
  found = train.run(cfg, tmp_path / "all", members=members, names=names)
  assert set(found["calm"]) == set(found["slow"]) >= {"test/accuracy", "train/loss"}
  assert "test/accuracy" not in found["wild"]
  status = records.read_status(tmp_path / "all")
  assert status["state"] == "done" and list(status["ended"]) == ["wild"]
  ended = status["ended"]["wild"]
  assert ended["reason"] == "diverged" and "member wild" in ended["message"]
  rows = records.read(tmp_path / "all")
  of_wild = [row["step"] for row in rows if row["member"] == 1]
  assert of_wild == list(range(1, ended["step"] + 1))
  assert all(np.isfinite(row["train/loss"]) for row in rows)
  together = states(tmp_path / "all")
  assert together["step"].tolist() == [10, ended["step"], 10]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(together))
  for i in (0, 2):
    train.run(cfg, tmp_path / names[i], members=[members[i]])
    alone = states(tmp_path / names[i])
    for name, leaf in alone.items():
      if at_once == 1:
        np.testing.assert_array_equal(together[name][i], leaf[0], err_msg=name)
      else:
        np.testing.assert_allclose(together[name][i], leaf[0], atol=1e-6)


def test_all_members_diverged_is_a_failure(tmp_path):
  with pytest.raises(Diverged, match="nothing was saved before"):
    train.run(sgd(), tmp_path, members=[{"optim.lr": WILD}, {"optim.lr": 2 * WILD}])
  assert len(records.read_status(tmp_path)["ended"]) == 2


def test_a_run_with_an_ended_member_goes_on_as_unbroken(tmp_path):
  cfg = sgd(
    train__keep=None, train__checkpoint_every="2 steps", train__log_every="3 steps"
  )
  members = [{"optim.lr": 1e-2}, {"optim.lr": WILD}]
  train.run(cfg, tmp_path, members=members)
  rows, state = records.read(tmp_path), states(tmp_path)
  for step in (6, 8, 10):
    shutil.rmtree(tmp_path / "checkpoints" / str(step))
  train.run(cfg, tmp_path, members=members)
  assert records.equal(rows, records.read(tmp_path)) == []
  again = states(tmp_path)
  for name, leaf in state.items():
    np.testing.assert_array_equal(again[name], leaf, err_msg=name)
  assert list(records.read_status(tmp_path)["ended"]) == ["1"]


def test_halving_keeps_the_best_and_stops_the_others(tmp_path):
  rates = [1e-5, 3e-2, 1e-2, 3e-4, 1e-3]
  cfg = tiny.make(
    train__halving=("4 steps", 0.5), train__length="20 steps", data__val=0.2
  )
  job = train.prepare(cfg, members=[{"optim.lr": r} for r in rates])
  assert job.schedule.rungs == {4: 3, 8: 2, 16: 1}
  found = train.run(cfg, tmp_path / "all", members=[{"optim.lr": r} for r in rates])
  ended = records.read_status(tmp_path / "all")["ended"]
  assert len(ended) == 4
  rows = records.read(tmp_path / "all")
  left = set(range(5))
  for rung, keep in job.schedule.rungs.items():
    scores = {
      row["member"]: (-row["val/accuracy"], row["val/loss"])
      for row in rows
      if row["step"] == rung and "val/loss" in row
    }
    assert set(scores) == left
    best = set(sorted(left, key=lambda m: (*scores[m], m))[:keep])
    gone = {int(name) for name, how in ended.items() if how["step"] == rung}
    assert gone == left - best
    left = best
  (winner,) = left
  assert "test/accuracy" in found[str(winner)]
  assert sum("test/accuracy" in metrics for metrics in found.values()) == 1
  state = states(tmp_path / "all")
  assert state["step"].tolist() == [
    ended[str(i)]["step"] if str(i) in ended else 20 for i in range(5)
  ]
  # The one that is left was not touched by the others.
  alone = tiny.make(train__length="20 steps", data__val=0.2, optim__lr=rates[winner])
  train.run(alone, tmp_path / "alone")
  for name, leaf in states(tmp_path / "alone").items():
    np.testing.assert_array_equal(state[name][winner], leaf[0], err_msg=name)


def test_halving_goes_on_as_unbroken(tmp_path):
  cfg = tiny.make(
    train__halving=("3 steps", 0.5),
    data__val=0.2,
    train__keep=None,
    train__checkpoint_every="2 steps",
  )
  members = [{"optim.lr": r} for r in (1e-5, 1e-2, 1e-3, 3e-3)]
  train.run(cfg, tmp_path, members=members)
  rows, ended = records.read(tmp_path), records.read_status(tmp_path)["ended"]
  for step in (6, 8, 10):
    shutil.rmtree(tmp_path / "checkpoints" / str(step))
  train.run(cfg, tmp_path, members=members)
  assert records.equal(rows, records.read(tmp_path)) == []
  assert records.read_status(tmp_path)["ended"] == ended


def test_halving_that_cannot_be_is_refused():
  with pytest.raises(ConfigError, match=r"data.val=0.1"):
    tiny.make(train__halving=("4 steps", 0.5))
  with pytest.raises(ConfigError, match="share between 0 and 1"):
    tiny.make(train__halving=("4 steps", 2), data__val=0.2)
  with pytest.raises(ConfigError, match="train.halving="):
    tiny.make(train__halving="4 steps", data__val=0.2)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_member_that_ended_stays_so_when_its_steps_would_be_finite_again(at_once):
  """Only step 1 of the second member is not finite; the third is not active."""

  def step(state, batch, hyper, reduce):
    del reduce
    finite = hyper["bad"] != batch["row"][0]
    state = jax.tree.map(lambda leaf: leaf + finite.astype(leaf.dtype), state)
    return state, {"finite": finite.astype(np.float32)}

  call = population.train_many(step, at_once, None)
  members = 4
  state = {"step": np.zeros(members, np.int32), "x": np.zeros(members, np.float32)}
  hypers = {"bad": np.array([9, 1, 9, 9]), "active": np.array([1, 1, 0, 1], bool)}
  for first in (0, 3):
    rows = np.broadcast_to(np.arange(first, first + 3)[:, None], (members, 3, 2))
    batches = {"row": rows, "image": rows}
    span = np.array([first, first + 3], np.int32)
    state, history = jax.jit(call)(state, batches, hypers, {}, {}, span)
    assert history["finite"].tolist()[0] == [1, 1, 1]
  assert state["step"].tolist() == [6, 1, 0, 6]
  assert state["x"].tolist() == [6, 1, 0, 6]

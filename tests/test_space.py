"""The algebra of trials."""

import math

import pytest

from vit_jax.config import ConfigError
from vit_jax.sweep import space


def test_product_zipped_and_chain():
  a, b = space.grid("a", [1, 2]), space.grid("b", ["x", "y"])
  assert space.product(a, b) == [
    {"a": 1, "b": "x"},
    {"a": 1, "b": "y"},
    {"a": 2, "b": "x"},
    {"a": 2, "b": "y"},
  ]
  assert space.zipped(a, b) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
  assert space.chain(a, b) == [{"a": 1}, {"a": 2}, {"b": "x"}, {"b": "y"}]
  assert space.product() == [{}]


def test_a_trial_does_not_share_its_values_with_another():
  joined = space.chain(space.grid("a", [1]))
  joined[0]["a"] = 2
  assert space.chain(space.grid("a", [1])) == [{"a": 1}]
  first = space.grid("a", [1])
  both = space.chain(first, first)
  both[0]["a"] = 3
  assert both[1] == {"a": 1} and first == [{"a": 1}]


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: space.grid("model.pool", "cls"), "list of values"),
    (lambda: space.grid("seed", []), "nothing to try"),
    (lambda: space.product(space.grid("a", [1]), space.grid("a", [2])), "set twice"),
    (lambda: space.zipped(space.grid("a", [1]), space.grid("b", [1, 2])), "lengths"),
    (lambda: space.log_uniform(0, 1), "0 < low < high"),
    (lambda: space.uniform(1, 1), "low < high"),
    (lambda: space.sample(3, {"a": (1, 2)}, seed=0), "expected uniform"),
    (lambda: space.sample(0, {"a": space.uniform(0, 1)}, seed=0), "nothing to try"),
    (lambda: space.product(space.arm("a", {}), space.arm("b", {})), "set twice"),
  ],
)
def test_what_cannot_be_is_refused(make, words):
  with pytest.raises(ConfigError, match=words):
    make()


def test_samples_cover_the_ranges_evenly():
  ranges = {
    "optim.lr": space.log_uniform(1e-4, 1.0),
    "optim.weight_decay": space.uniform(0.1, 0.3),
    "model.depth": space.integers(2, 5),
  }
  trials = space.sample(400, ranges, seed=1)
  logs = [math.log10(t["optim.lr"]) for t in trials]
  for low in range(-4, 0):
    assert 95 <= sum(low <= value < low + 1 for value in logs) <= 105
  assert all(0.1 <= t["optim.weight_decay"] <= 0.3 for t in trials)
  depths = [t["model.depth"] for t in trials]
  assert {depths.count(d) for d in (2, 3, 4, 5)} <= set(range(95, 106))
  assert all(isinstance(d, int) for d in depths)


def test_more_samples_begin_with_those_of_fewer():
  ranges = {"optim.lr": space.log_uniform(1e-4, 1.0)}
  assert space.sample(9, ranges, seed=0)[:5] == space.sample(5, ranges, seed=0)
  assert space.sample(5, ranges, seed=0) != space.sample(5, ranges, seed=1)

"""The trials of a sweep, as lists of overrides.

    product(grid("model.patch", [2, 3, 4]), grid("seed", range(8)))     24 trials
    zipped(grid("model.width", [48, 96]), grid("optim.lr", [1e-2, 5e-3]))   2 trials
    chain(arm("P2S2", {"model.patch": 2}), arm("P4S2", {"model.patch": 4, ...}))
    sample(16, {"optim.lr": log_uniform(1e-4, 1e-1)}, seed=0)

A space is a list of dictionaries, from dotted names of settings to values; what these
functions return may be sliced, filtered and put together like any list.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import qmc

from vit_jax.config import ConfigError

Space = list[dict[str, Any]]

# An arm stands among the overrides under this name, which is that of no setting.
ARM = "arm"


class Arm(NamedTuple):
  """The name of an arm, and the settings that it stands for."""

  name: str
  settings: tuple[str, ...]


class Range(NamedTuple):
  """Values from `low` to `high`, evenly spread, or evenly in their logarithm."""

  low: float
  high: float
  log: bool
  whole: bool

  def at(self, share: float) -> float | int:
    """Returns the value at a share from 0 to below 1 of the range."""
    low, high = self.low, self.high + self.whole  # an integer has a width of 1
    if self.log:
      value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
      value = low + share * (high - low)
    if self.whole:
      return min(math.floor(value), int(self.high))
    # Four digits, so that names can be read; not beyond the ends.
    return min(max(float(f"{value:.4g}"), self.low), self.high)


def uniform(low: float, high: float) -> Range:
  """Returns the range of the numbers from `low` to `high`."""
  return _range(low, high, log=False, whole=False)


def log_uniform(low: float, high: float) -> Range:
  """Returns the range whose logarithms are evenly spread; `low` above 0."""
  return _range(low, high, log=True, whole=False)


def integers(low: int, high: int, *, log: bool = False) -> Range:
  """Returns the range of the integers from `low` to `high`, both of them in it."""
  return _range(low, high, log=log, whole=True)


def _range(low, high, log, whole):
  if not low < high or (log and low <= 0):
    least = "0 < low < high" if log else "low < high"
    raise ConfigError(f"a range from {low} to {high}: expected {least}")
  return Range(low, high, log, whole)


def grid(name: str, values: Iterable[Any]) -> Space:
  """Returns one trial a value of a setting.

  Raises:
    ConfigError: no values, or a text, whose letters are hardly meant.
  """
  if isinstance(values, str):
    raise ConfigError(f"grid({name!r}, {values!r}): expected a list of values")
  space = [{name: value} for value in values]
  if not space:
    raise ConfigError(f"grid({name!r}, []): there is nothing to try")
  return space


def arm(name: str, overrides: Mapping[str, Any]) -> Space:
  """Returns one trial under a name of its own: an arm of an experiment, to be multiplied
  with seeds. The name stands for the overrides in the names of trials and in reports."""
  if ARM in overrides:
    raise ConfigError(f"arm({name!r}): {ARM!r} is no setting")
  return [{ARM: Arm(name, tuple(overrides)), **overrides}]


def product(*spaces: Sequence[Mapping[str, Any]]) -> Space:
  """Returns every trial of each space with every one of the others; the last changes
  fastest."""
  return [_joined(parts) for parts in itertools.product(*spaces)]


def zipped(*spaces: Sequence[Mapping[str, Any]]) -> Space:
  """Returns the first trials of all spaces together, then the second ones, …

  Raises:
    ConfigError: spaces of different lengths.
  """
  lengths = [len(space) for space in spaces]
  if len(set(lengths)) > 1:
    raise ConfigError(f"zipped: spaces of {lengths} trials; expected equal lengths")
  return [_joined(parts) for parts in zip(*spaces)]


def chain(*spaces: Sequence[Mapping[str, Any]]) -> Space:
  """Returns the trials of each space, one space after the other."""
  return [dict(trial) for trial in itertools.chain(*spaces)]


def sample(count: int, ranges: Mapping[str, Range], *, seed: int) -> Space:
  """Returns trials that cover the ranges evenly, whatever their number: points of a
  scrambled Halton sequence (Owen 2017), one dimension a setting.

  Args:
    count: number of trials; the first n of more trials are those of n.
    ranges: of the settings, as `log_uniform(1e-4, 1e-1)`.
    seed: of the scrambling.
  """
  for name, values in ranges.items():
    if not isinstance(values, Range):
      raise ConfigError(
        f"sample: {name}={values!r}; expected uniform, log_uniform or integers"
      )
  if count < 1 or not ranges:
    raise ConfigError(f"sample({count}, {dict(ranges)}): there is nothing to try")
  points = qmc.Halton(len(ranges), scramble=True, rng=seed).random(count)
  return [
    {name: r.at(float(share)) for (name, r), share in zip(ranges.items(), point)}
    for point in points
  ]


def _joined(parts):
  joined = {}
  for part in parts:
    for name, value in part.items():
      if name in joined:
        raise ConfigError(
          f"{name} is set twice in one trial: {joined[name]!r} and {value!r}"
        )
      joined[name] = value
  return joined

"""What a training run does beside its steps: data, logging, saving, handing over."""

import pathlib
import tempfile
import time

import jax

from vit_jax import config, devices, evaluate, train
from vit_jax.bench import race, report, sizes
from vit_jax.config import ConfigError

# Shorter than the recipe; it logs, evaluates and saves as often.
LENGTH = {"train.length": "30 epochs"}


def run(changes, rounds) -> report.Result:
  """Runs a training `rounds` times with every call of the program waited for.

  Waiting takes away the overlap of the host's work with the device's, so that the share
  is an upper bound. The first calls, which compile, are left out.

  Args:
    changes: settings on top of configs/digits.py, by dotted name.
    rounds: runs; the first one, besides, fills the caches.
  """
  base = config.override(sizes.recipe("digits"), LENGTH | dict(changes))
  if base.train.parallel != "jit":
    raise ConfigError(f'train.parallel={base.train.parallel!r}: expected "jit" here')
  found = [_shares(base) for _ in range(rounds + 1)][1:]
  parts = list(found[0])
  return report.Result(
    name="overhead",
    title=f"a run of {base.data.name}, {base.train.length}",
    rows=[
      {"part": part, "share in %": race.spread([100 * f[part] for f in found])}
      for part in parts
    ],
    limits={},
    notes={"rounds": rounds},
    raw={"shares of each round": found},
    plot=("share in %", None),
  )


def _shares(base):
  """Returns the shares of one run's time."""
  taken = {"steps": 0.0, "evaluation": 0.0}
  began = first_evaluation = None
  original_train, original_values = devices.Jit.train, evaluate.values

  def timed_train(self, *arguments):
    nonlocal began
    begin = time.perf_counter()
    out = jax.block_until_ready(original_train(self, *arguments))
    end = time.perf_counter()
    if began is None:
      began = end
    else:
      taken["steps"] += end - begin
    return out

  def timed_values(*arguments):
    nonlocal first_evaluation
    begin = time.perf_counter()
    out = original_values(*arguments)
    seconds = time.perf_counter() - begin
    if first_evaluation is None:
      first_evaluation = seconds
    else:
      taken["evaluation"] += seconds
    return out

  devices.Jit.train, evaluate.values = timed_train, timed_values
  try:
    with tempfile.TemporaryDirectory() as folder:
      train.run(base, pathlib.Path(folder) / "run")
      whole = time.perf_counter() - began - first_evaluation
  finally:
    devices.Jit.train, evaluate.values = original_train, original_values
  rest = whole - sum(taken.values())
  named = {**taken, "everything else": rest}
  return {name: value / whole for name, value in named.items()}

"""Seconds from the command line to a test accuracy: our training run beside the same
recipe in PyTorch."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from vit_jax import config
from vit_jax.bench import race, report, sizes
from vit_jax.config import ConfigError

RECIPE = "fashion_mnist"
ACCURACIES = ("test/accuracy", "test_ema/accuracy")  # the better one counts
TURN = 20  # seconds
POLL = 0.05


class Command:
  """A training run as a process that is let on and held, turn by turn.

  Attributes:
    seconds: how long it was let run, in all.
    reached: those seconds when each row with a test accuracy was seen, and the accuracy.
  """

  def __init__(self, command, folder: pathlib.Path):
    self.seconds, self.reached = 0.0, []
    self._folder = folder
    self._process = subprocess.Popen(
      command,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,  # so that its children are held too
    )
    self._signal(signal.SIGSTOP)

  def turn(self, target: float) -> bool:
    """Lets it run for a turn; returns whether it has more to do: it is still running and
    has not reached the target."""
    begin, before = time.monotonic(), self.seconds
    self._signal(signal.SIGCONT)
    while self.seconds - before < TURN:
      ended = self._process.poll() is not None
      self.seconds = before + time.monotonic() - begin
      self._look()
      if ended or self.best() >= target:
        self._check()
        return self.stop()
      time.sleep(POLL)
    self._signal(signal.SIGSTOP)
    return True

  def best(self) -> float:
    """Returns the best accuracy so far."""
    return max((accuracy for _, accuracy in self.reached), default=0.0)

  def stop(self) -> bool:
    """Ends it."""
    self._signal(signal.SIGKILL)
    self._process.wait()
    self._process.stderr.close()
    return False

  def _look(self):
    with contextlib.suppress(OSError):
      lines = (self._folder / "metrics.jsonl").read_text().splitlines(keepends=True)
      rows = [json.loads(line) for line in lines if line.endswith("\n")]
      found = [[r[name] for name in ACCURACIES if name in r] for r in rows]
      for values in [v for v in found if v][len(self.reached) :]:
        self.reached.append((self.seconds, max(values)))

  def _check(self):
    if self._process.returncode:
      last = self._process.stderr.read().strip().splitlines()[-1:]
      raise race.Missing(f"it ended with {self._process.returncode}: {' '.join(last)}")

  def _signal(self, number):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)


def run(target, length, rounds) -> report.Result:
  """Races runs of configs/fashion_mnist.py to a test accuracy, both from the start of
  the process. They take turns of some seconds, so that both meet the same machine.

  Args:
    target: accuracy from 0 to 1, measured after every epoch.
    length: of the runs, such as "30 epochs"; the schedule follows it.
    rounds: races; number i has seed i.

  Raises:
    ConfigError: no length that is given in epochs.
  """
  changed = config.override(sizes.recipe(RECIPE), {"train.length": length})
  if changed.train.length.unit != "epochs" or changed.train.length.amount % 1:
    raise ConfigError(f"--lengths={length}: expected whole epochs here")
  raw = []
  with tempfile.TemporaryDirectory() as folder:
    for seed in range(rounds):
      raw.append(_race(pathlib.Path(folder), target, length, seed))
  rows = []
  for name in ("vit_jax", "PyTorch"):
    found = [r[name] for r in raw]
    seconds = [f["seconds"][-1] if f["accuracy"][-1] >= target else None for f in found]
    epochs = [_epochs(f["seconds"]) for f in found]
    rows.append(
      {
        "contender": name,
        f"seconds to {100 * target:g} %": None
        if None in seconds
        else race.spread(seconds),
        "epochs": race.spread([len(f["seconds"]) for f in found]),
        "best accuracy in %": race.spread([100 * max(f["accuracy"]) for f in found]),
        "seconds to the first row": race.spread([f["seconds"][0] for f in found]),
        "seconds of an epoch": race.spread(epochs),
        "_seconds": seconds,
      }
    )
  ours, theirs = (row.pop("_seconds") for row in rows)
  shares = [a / b for a, b in zip(ours, theirs) if a and b]
  return report.Result(
    name="recipe",
    title=f"{RECIPE}, {length}, to {100 * target:g} % of test",
    rows=rows,
    limits={},
    notes={
      "our share of PyTorch's time": race.spread(shares) if shares else None,
      "rounds": rounds,
    },
    raw={"seconds and accuracy after each epoch": raw},
    plot=("seconds of an epoch", None),
  )


def _race(folder, target, length, seed):
  """Returns, of each contender, seconds and accuracy after each epoch."""
  places = {name: folder / f"{name}-{seed}" for name in ("vit_jax", "PyTorch")}
  commands = {
    "vit_jax": [
      str(sizes.ROOT / "scripts" / "train.py"),
      f"--config={sizes.recipe_file(RECIPE)}",
      f"--workdir={places['vit_jax']}",
      f"--config.train.length={length}",
      "--config.train.eval_every=1 epochs",
      f"--config.seed={seed}",
    ],
    "PyTorch": [
      *("-m", "vit_jax.bench.recipe_torch"),
      *(str(places["PyTorch"]), length, str(seed)),
    ],
  }
  running = {
    name: Command([sys.executable, *arguments], places[name])
    for name, arguments in commands.items()
  }
  left = dict(running)
  try:
    while left:
      for name, command in list(left.items()):
        if not command.turn(target):
          del left[name]
  finally:
    for command in left.values():
      command.stop()
  return {
    name: dict(zip(("seconds", "accuracy"), map(list, zip(*command.reached))))
    for name, command in running.items()
  }


def _epochs(seconds):
  """Returns the median time of an epoch, the first one, with start-up, left out."""
  times = [b - a for a, b in itertools.pairwise(seconds)]
  return statistics.median(times) if times else seconds[0]

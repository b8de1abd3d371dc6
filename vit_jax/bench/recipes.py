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

from vit_jax import config, signals
from vit_jax.bench import race, report, sizes
from vit_jax.config import ConfigError

RECIPE = "fashion_mnist"
OURS, THEIRS = "vit_jax", "PyTorch"
ACCURACIES = ("test/accuracy", "test_ema/accuracy")  # the better one counts
TURN = 20  # seconds
POLL = 0.05
ROUNDING = 1e-9  # of an accuracy


class Command:
  """A training run as a process that is let on and held, turn by turn.

  Attributes:
    seconds: how long it was let run, in all.
    reached: (seconds, accuracy) of each row with a test accuracy, when it was seen.
  """

  def __init__(self, command, folder: pathlib.Path, environment=None):
    self.seconds, self.reached = 0.0, []
    self._rows, self._read = folder / "metrics.jsonl", 0
    self._errors = folder.with_suffix(".stderr")
    with self._errors.open("w") as file:
      self._process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=file,
        env=environment,
        start_new_session=True,  # so that its children are held too
      )
    self._signal(signal.SIGSTOP)

  def turn(self, target: float) -> bool:
    """Lets it run for a turn; returns whether it has more to do: it is still running and
    has not reached the target.

    Raises:
      Missing: it failed, or ended without a row.
    """
    begin, before = time.monotonic(), self.seconds
    self._signal(signal.SIGCONT)
    while self.seconds - before < TURN:
      over = self._process.poll() is not None
      self.seconds = before + time.monotonic() - begin
      self._look()
      if over or self.first(target) is not None:
        self.stop()
        if over:
          self._check()
        return False
      time.sleep(POLL)
    self._signal(signal.SIGSTOP)
    self.seconds = before + time.monotonic() - begin
    return True

  def first(self, target: float) -> float | None:
    """Returns the seconds when the target was reached."""
    seen = (s for s, accuracy in self.reached if accuracy >= target - ROUNDING)
    return next(seen, None)

  def stop(self):
    """Ends it."""
    self._signal(signal.SIGKILL)
    self._process.wait()

  @property
  def ended(self) -> bool:
    """Whether it runs no more."""
    return self._process.poll() is not None

  def _look(self):
    with contextlib.suppress(OSError), self._rows.open() as file:
      file.seek(self._read)
      text = file.read()
      whole = text[: text.rfind("\n") + 1]
      self._read += len(whole)  # every byte is a character: rows are ASCII
      for line in whole.splitlines():
        values = [v for n, v in json.loads(line).items() if n in ACCURACIES]
        if values:
          self.reached.append((self.seconds, max(values)))

  def _check(self):
    last = " ".join(self._errors.read_text().strip().splitlines()[-1:])
    if self._process.returncode or not self.reached:
      raise race.Missing(f"it ended with {self._process.returncode}: {last}")

  def _signal(self, number):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)


def run(target, length, rounds) -> report.Result:
  """Races runs of configs/fashion_mnist.py to a test accuracy, both from the start of
  the process, on the CPU, with nothing compiled. They take turns of some seconds, so
  that both meet the same machine, until one is there; the other goes on alone.

  Args:
    target: accuracy from 0 to 1, measured after every epoch.
    length: of the runs, such as "30 epochs"; the schedule follows it.
    rounds: races; number i has seed i.

  Raises:
    ConfigError: no length in whole epochs, or our own run failed.
  """
  changed = config.override(sizes.recipe(RECIPE), {"train.length": length})
  amount = changed.train.length.amount
  if changed.train.length.unit != "epochs" or amount % 1 or amount < 1:
    raise ConfigError(f"--recipe_length={length}: expected whole epochs")
  found = {OURS: [], THEIRS: []}

  def stopped(name):
    raise SystemExit(f"stopped: {name}")  # and so through every `finally`

  with (
    signals.handled(stopped, signal.SIGTERM),
    tempfile.TemporaryDirectory() as folder,
  ):
    for seed in range(rounds):
      commands = _race(pathlib.Path(folder), target, length, seed)
      for name, command in commands.items():
        found[name].append(command)
  times = {name: [c.first(target) for c in of_name] for name, of_name in found.items()}
  shares = [a / b for a, b in zip(*times.values()) if a and b]
  return report.Result(
    name="recipe",
    title=f"{RECIPE}, {length}, to {100 * target:g} % of test",
    rows=[
      _row(name, of_name, times[name], target)
      for name, of_name in found.items()
      if of_name
    ],
    limits={},
    notes={
      "our share of PyTorch's time": race.spread(shares) if shares else None,
      "races in which both got there": len(shares),
      "rounds": rounds,
    },
    raw={
      "seconds and accuracy after each epoch": {
        name: [c.reached for c in of_name] for name, of_name in found.items()
      }
    },
    plot=("seconds of an epoch", None),
  )


def _row(name, commands, times, target):
  rows = [[seconds for seconds, _ in c.reached] for c in commands]
  return {
    "contender": name,
    f"seconds to {100 * target:g} %": None if None in times else race.spread(times),
    "epochs": race.spread([len(r) for r in rows]),
    "best accuracy in %": race.spread(
      [100 * max(accuracy for _, accuracy in c.reached) for c in commands]
    ),
    "seconds to the first evaluation": race.spread([r[0] for r in rows]),
    "seconds of an epoch": race.spread([_epoch(r) for r in rows]),
  }


def _race(folder, target, length, seed) -> dict[str, Command]:
  """Returns the commands that got through, after their last turn."""
  places = {name: folder / f"{name}-{seed}" for name in (OURS, THEIRS)}
  lines = {
    OURS: sizes.train_command(
      RECIPE,
      workdir=places[OURS],
      config__train__length=length,
      config__train__eval_every="1 epochs",
      config__seed=seed,
    ),
    THEIRS: [
      *(sys.executable, "-m", "vit_jax.bench.recipe_torch"),
      *(str(places[THEIRS]), length, str(seed)),
    ],
  }
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{seed}"),
    "JAX_PLATFORMS": "cpu",
  }
  with contextlib.ExitStack() as stack:
    commands = {}
    for name, line in lines.items():
      commands[name] = Command(line, places[name], environment)
      stack.callback(commands[name].stop)
    left = dict(commands)
    while left:
      for name, command in list(left.items()):
        try:
          if not command.turn(target):
            del left[name]
        except race.Missing as error:
          if name == OURS:
            raise ConfigError(f"{name}: {error}") from error
          print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
          del left[name], commands[name]
  return commands


def _epoch(seconds):
  """Returns the median time of an epoch with its evaluation, the first one, with
  start-up, left out."""
  times = [b - a for a, b in itertools.pairwise(seconds)]
  return statistics.median(times) if times else seconds[0]

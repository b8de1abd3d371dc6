"""Contenders in processes of their own, which take turns.

A machine that others share slows down for seconds at a time. So no contender's rounds
stand together: each round of one is followed by a round of the next, and what counts is
the ratio of the two, pair by pair.
"""

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_jax.config import ConfigError

# The first compiles, the second has no memory yet.
WARM_UP = 2


class Runner(NamedTuple):
  """What a contender's process holds.

  Attributes:
    go: makes one round; returns when all of it is done.
    facts: what is told of it, such as its number of parameters.
  """

  go: Callable[[], Any]
  facts: Mapping[str, Any]


class Missing(Exception):
  """What a contender needs is not installed, or it cannot do this."""


class Contender:
  """One way of doing the work, in a process of its own: neither its threads nor its
  memory are in another's way.

  Args:
    make: a function of a module (it is sent by name), `make(*arguments) -> Runner`.
    arguments: sent as they are.
    needs: modules that it needs, imported before `make` is called.

  Raises:
    Missing: a module of `needs` is not there, or `make` failed.
  """

  def __init__(self, make, *arguments, needs=()):
    # Not a fork: JAX has threads.
    context = multiprocessing.get_context("spawn")
    self._pipe, other = context.Pipe()
    # Not a daemon, which could have no processes of its own (as loaders have).
    self._process = context.Process(target=_serve, args=(other, make, arguments, needs))
    self._process.start()
    other.close()
    atexit.register(self.close)
    self.facts = self._answer()

  def round(self) -> float:
    """Returns the seconds of one round."""
    return self._ask("round")

  def memory(self) -> tuple[float, float] | tuple[None, None]:
    """Returns the resident MiB that one round takes at most, and that are held between
    rounds besides what the imported libraries hold; None where the system does not
    tell. What is free in the heap is given back before."""
    return self._ask("memory")

  def close(self):
    """Ends the process."""
    atexit.unregister(self.close)
    self._pipe.close()
    self._process.join(10)
    if self._process.exitcode is None:
      self._process.terminate()

  def _ask(self, what):
    try:
      self._pipe.send(what)
    except OSError:
      raise RuntimeError("a contender's process has ended") from None
    return self._answer()

  def _answer(self):
    try:
      answer = self._pipe.recv()
    except EOFError:
      self._process.join(5)
      code = self._process.exitcode
      raise RuntimeError(f"a contender's process ended with code {code}") from None
    if isinstance(answer, Exception):
      raise answer
    return answer


def contenders(
  named: Mapping[str, Callable[[], Contender]], ours: str
) -> dict[str, Contender]:
  """Starts contenders one after another and warms them up.

  Says which are left out, and why: a peer that fails is no reason to stop.

  Raises:
    ConfigError: our own, the one named `ours`, failed.
  """
  started = {}
  for name, start in named.items():
    try:
      contender = start()
      for _ in range(WARM_UP):
        contender.round()
      started[name] = contender
    except (Missing, RuntimeError) as error:
      if name == ours:
        raise ConfigError(f"{name}: {error}") from error
      print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
  return started


def race(named: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
  """Returns the seconds of every round, by contender; round i of all is one turn."""
  seconds = {name: [] for name in named}
  for _ in range(rounds):
    for name, contender in named.items():
      seconds[name].append(contender.round())
  return seconds


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
  """Returns their seconds over ours, turn by turn, sorted: above 1, we are faster."""
  return sorted(t / o for o, t in zip(ours, theirs, strict=True))


def spread(values: list[float]) -> tuple[float, float, float]:
  """Returns the median, the least and the most."""
  return statistics.median(values), min(values), max(values)


def seconds(function) -> float:
  """Returns how long one call takes."""
  begin = time.perf_counter()
  function()
  return time.perf_counter() - begin


def _serve(pipe, make, arguments, needs):
  with contextlib.suppress(EOFError, BrokenPipeError):  # the race is over
    try:
      before = _import(needs)
      try:
        runner = make(*arguments)
      except Exception as error:
        raise Missing(f"{type(error).__name__}: {error}") from error
      pipe.send(dict(runner.facts))
      while True:
        what = pipe.recv()
        pipe.send(seconds(runner.go) if what == "round" else _memory(runner.go, before))
    except (EOFError, BrokenPipeError):
      raise
    except Missing as error:
      pipe.send(error)
    except Exception as error:
      pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _import(needs):
  """Imports modules; returns the resident bytes after that, None if unknown."""
  for name in needs:
    try:
      importlib.import_module(name)
    except ImportError as error:
      raise Missing(f"{error}; try pip install -e '.[bench]'") from error
  return _resident("VmRSS")


def _memory(go, before):
  if before is None:
    return None, None
  # What compiling left behind goes back to the system first.
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL("libc.so.6").malloc_trim(0)
  try:
    with open("/proc/self/clear_refs", "w") as file:
      file.write("5")
  except OSError:
    return None, None
  held = _resident("VmRSS")
  go()
  return (_resident("VmHWM") - held) / 2**20, (held - before) / 2**20


def _resident(name):
  """Returns a figure of /proc/self/status in bytes (VmRSS: now, VmHWM: the most)."""
  try:
    with open("/proc/self/status") as file:
      lines = dict(line.split(":", 1) for line in file)
    return int(lines[name].split()[0]) * 1024
  except (OSError, KeyError):
    return None

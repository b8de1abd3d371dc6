"""The groups of a sweep on this machine, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time

from vit_jax import lock, signals
from vit_jax.command import STOPPED
from vit_jax.config import ConfigError
from vit_jax.errors import Stopped
from vit_jax.sweep import launch

# Seconds between two looks at the processes.
_PAUSE = 0.1


def run(folder, script: str, at_once: int = 1) -> list[str]:
  """Runs the groups that are not done.

  Args:
    folder: of the sweep.
    script: path of scripts/sweep.py.
    at_once: processes at a time, which share the processors evenly. The operations of a
      small model are too short for several threads: with one processor each, processes
      do more together.

  Returns:
    The groups that failed. The others are done, or run elsewhere.

  Raises:
    Stopped: by SIGTERM or Ctrl-C, which the running groups have got as well.
    ConfigError: another process runs this sweep, or there are fewer processors.
  """
  free = _shares(at_once)
  running, failed, stopped = {}, [], []

  def pass_on(name):
    for process, _ in running.values():
      process.send_signal(signal.Signals[name])

  with lock.Lock(folder):
    waiting = [
      group.id
      for group in launch.read(folder)
      if launch.state(folder, group)["state"] not in ("done", "running")
    ]
    with signals.handled(pass_on, signal.SIGTERM, signal.SIGINT):
      while running or (waiting and not stopped):
        while free and waiting and not stopped:
          name, processors = waiting.pop(0), free.pop(0)
          command = launch.command(script, folder, name)
          running[name] = _start(command, processors), processors
        for name, (process, processors) in list(running.items()):
          code = process.poll()
          if code is None:
            continue
          del running[name]
          free.append(processors)
          if code == STOPPED:
            stopped.append(name)
            pass_on("SIGTERM")
          elif code:
            failed.append(name)
            text = f"the process of this group ended with {code}"
            launch.note_failure(launch.run_folder(folder, name), text)
            print(f"group {name} failed ({code}); the others go on", file=sys.stderr)
        time.sleep(_PAUSE)
  if stopped:
    raise Stopped(f"in group {stopped[0]}; the same command goes on from there")
  return failed


def _shares(at_once: int) -> list[set[int] | None]:
  """Returns the processors of each of the processes that run at once; None: all.

  Raises:
    ConfigError: less than one processor for each.
  """
  if at_once < 1:
    raise ConfigError(f"--at_once={at_once}: expected 1 or more")
  if at_once == 1:
    return [None]
  if not hasattr(os, "sched_setaffinity"):  # outside Linux
    return [None] * at_once
  ours = sorted(os.sched_getaffinity(0))
  if at_once > len(ours):
    raise ConfigError(
      f"--at_once={at_once}: expected up to {len(ours)}, the processors of this machine"
    )
  return [set(ours[n::at_once]) for n in range(at_once)]


def _start(command: list[str], processors: set[int] | None) -> subprocess.Popen:
  # Signals from the terminal come to this process alone, which passes them on.
  process = subprocess.Popen(command, start_new_session=True)
  if processors is not None:
    os.sched_setaffinity(process.pid, processors)
  return process

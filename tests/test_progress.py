"""What a person sees of a run."""

import io
import os
import pathlib
import subprocess
import sys
import time

import pytest

from vit_jax.progress import Progress

ROOT = pathlib.Path(__file__).parents[1]


def python(code, *arguments, **options):
  """Starts a Python process that sees the package."""
  return subprocess.Popen(
    [sys.executable, "-c", code, *map(str, arguments)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    text=True,
    **options,
  )


def show(progress, steps, clock, seconds=1.0):
  for step in steps:
    clock[0] += seconds
    progress.update(
      step,
      {"train/loss": 1 / step, "train/accuracy": 0.5, "time/images_per_second": 1234.5},
    )


@pytest.fixture
def clock(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  return clock


def test_without_a_terminal_there_are_few_plain_lines(capsys, clock):
  progress = Progress(100, start=0, every=30.0)
  show(progress, range(1, 101), clock)
  progress.note("saved")
  progress.close()
  out, err = capsys.readouterr()
  assert out == ""
  assert err.splitlines() == [
    "step 1/100  loss 1.0000  accuracy 0.5000  1234 images/s",
    "step 31/100  loss 0.0323  accuracy 0.5000  1234 images/s  0:01:09 left",
    "step 61/100  loss 0.0164  accuracy 0.5000  1234 images/s  0:00:39 left",
    "step 91/100  loss 0.0110  accuracy 0.5000  1234 images/s  0:00:09 left",
    "step 100/100  loss 0.0100  accuracy 0.5000  1234 images/s  0:00:00 left",
    "saved",
  ]


def test_the_last_line_of_a_stopped_run_is_shown(capsys, clock):
  progress = Progress(7200, start=10, every=30.0)
  show(progress, [11, 12, 13], clock)
  progress.update(13, {})
  progress.close()
  progress.close()
  lines = capsys.readouterr().err.splitlines()
  assert [line.split()[1] for line in lines] == ["11/7200", "13/7200"]
  assert lines[-1] == "step 13/7200  1:59:47 left"


def test_a_terminal_gets_a_bar(monkeypatch):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  terminal = Terminal()
  monkeypatch.setattr(sys, "stderr", terminal)
  progress = Progress(20, start=4)
  progress.update(8, {"train/loss": 0.125, "time/images_per_second": 99.0})
  progress.note("test/accuracy 0.9")
  progress.update(20, {"train/loss": 0.125})
  progress.close()
  text = terminal.getvalue()
  assert " 4/20 " in text and " 20/20 " in text and "loss 0.1250" in text
  assert "test/accuracy 0.9\n" in text
  assert text.endswith("\n")


@pytest.mark.parametrize("kind", ["none", "closed", "broken", "breaks later"])
def test_losing_stderr_does_not_stop_training(kind, monkeypatch):
  class Broken(io.StringIO):
    def isatty(self):
      return True

    def write(self, text):
      if broken:
        raise BrokenPipeError
      return super().write(text)

  streams = {"none": None, "closed": io.StringIO()}
  streams["closed"].close()
  monkeypatch.setattr(sys, "stderr", streams.get(kind, Broken()))
  broken = kind == "broken"
  progress = Progress(3)
  broken = True
  for step in (1, 2, 3):
    progress.update(step, {"train/loss": 1.0})
  progress.note("text")
  progress.close()


def test_progress_in_a_pipe_whose_reader_leaves():
  code = """
import sys
from vit_jax.progress import Progress
progress = Progress(3, every=0)
progress.update(1, {"train/loss": 1.0})
sys.stdin.readline()
progress.update(2, {})
progress.close()
print("end", flush=True)
"""
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  process = python(code, **pipes)
  assert process.stderr.readline() == "step 1/3  loss 1.0000\n"
  process.stderr.close()
  process.stdin.write("\n")
  process.stdin.close()
  assert process.stdout.read() == "end\n"
  process.stdout.close()
  process.wait()

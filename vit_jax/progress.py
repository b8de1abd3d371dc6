"""Shows a person how far a run is."""

import contextlib
import math
import sys
import time
from collections.abc import Mapping


class Progress:
  """Shows how far a run is, on stderr.

  On a terminal a bar with loss, accuracy, images/s and the time left; elsewhere a
  plain line for the first and the last update and at most every `every` seconds.

  Args:
    total: steps of the whole run.
    start: steps done already.
    every: seconds between plain lines.
  """

  def __init__(self, total: int, start: int = 0, every: float = 30.0):
    self._total = int(total)
    self._every = every
    self._bar = None
    self._pending = None
    self._last_line = -math.inf
    self._first = None
    if _is_terminal(sys.stderr):
      import tqdm

      with _lost_reader():
        self._bar = tqdm.tqdm(
          total=self._total,
          initial=int(start),
          file=sys.stderr,
          unit="step",
          dynamic_ncols=True,
        )

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Shows `step` (steps done) and, of `values`, what a person wants to see."""
    now = time.monotonic()
    text = _summary(values)
    if self._bar is not None:
      with _lost_reader():
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(step) - self._bar.n)
      return
    if self._first is None:
      self._first = (now, step)
    line = f"step {step}/{self._total}" + (f"  {text}" if text else "")
    since, begun = self._first
    if step > begun:
      seconds = (now - since) / (step - begun) * (self._total - step)
      line += f"  {_duration(seconds)} left"
    if step >= self._total or now - self._last_line >= self._every:
      self._print(line, now)
    else:
      self._pending = line

  def note(self, text: str) -> None:
    """Prints a line, above the bar where there is one."""
    if self._bar is not None:
      with _lost_reader():
        self._bar.write(text, file=self._bar.fp)
    else:
      self._print(text, self._last_line)

  def close(self) -> None:
    if self._bar is not None:
      with _lost_reader():
        self._bar.close()
      self._bar = None
    elif self._pending is not None:
      self._print(self._pending, self._last_line)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def _print(self, line, now):
    self._last_line, self._pending = now, None
    with _lost_reader():
      print(line, file=sys.stderr, flush=True)


def _lost_reader():
  """A closed terminal or pipe is no reason to stop training."""
  return contextlib.suppress(OSError, ValueError)


def _is_terminal(stream) -> bool:
  try:
    return stream.isatty()
  except (AttributeError, ValueError):  # no stream, or a closed one
    return False


def _summary(values: Mapping[str, float]) -> str:
  shown = (
    ("train/loss", "loss {:.4f}"),
    ("train/accuracy", "accuracy {:.4f}"),
    ("time/images_per_second", "{:.0f} images/s"),
  )
  return "  ".join(f.format(float(values[k])) for k, f in shown if k in values)


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}"

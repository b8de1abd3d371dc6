"""Figures of a run while it runs: means between rows, seconds, profiles."""

import contextlib
import logging
import time

import jax
import numpy as np


class Sums:
  """Means of metrics since the last row, in float64, per member.

  They are saved with a checkpoint, so that a resumed run writes the row that an
  unbroken one does.
  """

  def __init__(self):
    self._pending = []
    self._totals: dict[str, list[float]] = {}
    self._counts: list[int] = []
    self._rates: list[float] = []

  def add(self, step, count, history):
    """Takes the metrics of a call, [S, K] each, of `count` steps; a member that ends at
    a step that is not finite makes no more."""
    self._pending.append((step, count, history))

  def flush(self):
    """Waits for the calls and returns [(first step, values [S, count])] of them."""
    out = []
    for step, count, history in self._pending:
      values = {n: np.asarray(v)[:, :count] for n, v in jax.device_get(history).items()}
      # Steps before the first that is not finite, which is the last of its member.
      made = np.cumprod(values["finite"] > 0, axis=1).sum(axis=1).tolist()
      for name, value in values.items():
        old = self._totals.get(name, [0.0] * len(value))
        # Summed in turn: the result does not depend on how steps were cut into calls.
        self._totals[name] = [_summed(o, r[:m]) for o, r, m in zip(old, value, made)]
      self._counts = [n + m for n, m in zip(self._counts or [0] * len(made), made)]
      rates, old = values["learning_rate"], self._rates or [0.0] * len(made)
      self._rates = [float(r[m - 1]) if m else o for r, m, o in zip(rates, made, old)]
      out.append((step, values))
    self._pending = []
    return out

  def means(self):
    """Returns the means by member, nothing of one that has made no step, and begins
    anew."""
    out = [
      {
        f"train/{name}": total[i] / count
        for name, total in self._totals.items()
        if name != "finite" and count
      }
      for i, count in enumerate(self._counts)
    ]
    for row, rate in zip(out, self._rates):  # the rate of the last step, not a mean
      if row:
        row["train/learning_rate"] = rate
    self._totals, self._counts = {}, []
    return out

  def running(self):
    return {"totals": self._totals, "counts": self._counts, "rates": self._rates}

  def restore(self, running):
    self._totals, self._counts = dict(running["totals"]), list(running["counts"])
    self._rates = list(running["rates"])


def _summed(start, row):
  for value in row:
    start += float(value)
  return start


class Clock:
  """Seconds of training since the last row; evaluation and saving are left out."""

  def __init__(self, step):
    self._step, self._begin = step, time.perf_counter()
    self._wait = self._pause = 0.0

  @contextlib.contextmanager
  def waiting(self):
    begin = time.perf_counter()
    yield
    self._wait += time.perf_counter() - begin

  @contextlib.contextmanager
  def paused(self):
    begin = time.perf_counter()
    yield
    self._pause += time.perf_counter() - begin

  def figures(self, step, batch_size):
    """Returns the clock figures of the steps since the last call, and begins anew."""
    now = time.perf_counter()
    seconds = max(now - self._begin - self._pause, 1e-9)
    count = max(step - self._step, 1)
    out = {
      "time/images_per_second": count * batch_size / seconds,
      "time/step": seconds / count,
      "time/data_wait": self._wait / seconds,
    }
    self._step, self._begin, self._wait, self._pause = step, now, 0.0, 0.0
    return out


class Tracer:
  """Writes a profile of at least `steps` steps, after the first call, which compiles.

  Args:
    folder: where to; None: no profile.
    steps: least number of steps in it.
  """

  def __init__(self, folder, steps: int = 5):
    self._folder, self._steps = folder, steps
    self._begin = None  # step at which the profile began
    self._calls = 0

  def before(self, step):
    """Begins, where this is the second call of the program."""
    self._calls += 1
    if self._calls == 2 and self._folder is not None:
      jax.profiler.start_trace(str(self._folder))
      self._begin = step

  def after(self, step, state):
    """Ends after enough steps."""
    if self._begin is not None and step >= self._begin + self._steps:
      jax.block_until_ready(state)
      self.close()

  def close(self):
    """Ends a profile that is being made, or says why there is none."""
    if self._begin is not None:
      jax.profiler.stop_trace()
      self._begin = None
    elif self._folder is not None and self._calls < 2:
      logging.warning(
        "no profile: it begins with the second call of the program, which did not come; "
        "try a smaller train.steps_per_call"
      )

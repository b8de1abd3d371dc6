"""The loop of a run: steps, then what is due of logging, evaluating and saving."""

import contextlib
import logging
import math
import signal

import jax
import numpy as np

from vit_jax import (
  checkpoint,
  devices,
  evaluate,
  feed,
  meters,
  records,
  signals,
  transfer,
)
from vit_jax.config import ConfigError
from vit_jax.errors import Diverged, Stopped, listed
from vit_jax.progress import Progress


class Loop:
  """A run while it runs.

  Args:
    job: what it is made of (`train.Job`).
    folder: where it writes.
    status: of the folder.
  """

  def __init__(self, job, folder, status):
    self.job, self.folder, self.status = job, folder, status
    self.step = 0
    self.saved = None  # step of the newest checkpoint
    self.layout = devices.make(job.config, job.steps, len(job.members))
    self.hypers = self.layout.put(job.hypers)
    self.metrics: dict[int, dict[str, float]] = {}  # last values, by member
    self.ended: dict[int, dict] = {}  # who goes on no more: step, reason, message
    self.sums = meters.Sums()
    self.stop = None  # name of the signal that asked to stop

  def go(self, *, wandb, profile):
    job, schedule = self.job, self.job.schedule
    state, begin = self._first_state()
    self.step, self.saved = begin, begin or None
    keep = checkpoint.Keep(
      job.config.train.keep, schedule.keep_every, job.config.train.best_metric
    )
    names = [m.name for m in job.members]
    self.source = feed.make(job, self.layout, begin)
    with (
      _main_only(
        lambda: records.Metrics(
          self.folder, start_step=begin, members=names, wandb=wandb
        )
      ) as writer,
      contextlib.closing(checkpoint.Saver(self.folder, keep)) as saver,
      _main_only(lambda: Progress(schedule.total, begin)) as progress,
      contextlib.closing(
        meters.Tracer(self.folder / "profile" if profile else None)
      ) as tracer,
      self._signals(),
    ):
      if progress and begin == schedule.total:
        progress.note(f"{self.folder} is done: {begin} steps, nothing left to train")
      clock = meters.Clock(self.step)
      while self.step < schedule.total:
        tracer.before(self.step)
        stop_at = schedule.next_stop(self.step)
        count = min(job.config.train.steps_per_call, stop_at - self.step)
        with clock.waiting():
          batch = self.source.next(self.step, count)
        span = np.array([self.step, self.step + count], np.int32)
        state, history = self.layout.train(
          state, batch, self.hypers, *self.source.data, span
        )
        self.sums.add(self.step, count, history)
        self.step += count
        tracer.after(self.step, state)
        self.status.write("running", self.step, schedule.total)
        self._after_call(state, writer, saver, progress, clock)
      return self._finish(state)

  def _after_call(self, state, writer, saver, progress, clock):
    """Logs, evaluates and saves where that is due."""
    schedule, step = self.job.schedule, self.step
    end = step == schedule.total
    log = step % schedule.log == 0 or end
    test = (schedule.evaluate and step % schedule.evaluate == 0) or end
    test = test or step in schedule.rungs
    save = step % schedule.save == 0 or end
    stopping = self._asked_to_stop()
    if not (log or test or save or stopping):
      return
    self._note_diverged(self.sums.flush())
    found = [{} for _ in self.job.members]
    if log:
      found = self.sums.means()
      clock_figures = clock.figures(step, self.job.config.data.batch_size)
      found = [f and f | clock_figures for f in found]
    if test:
      with clock.paused():
        scores = self._evaluate(state, end)
      found = [f | s for f, s in zip(found, scores)]
      if step in schedule.rungs:
        self._drop(scores)
    evaluated = found[0] if test else {}
    self.metrics = {i: self.metrics.get(i, {}) | f for i, f in enumerate(found)}
    if writer:
      for i, row in enumerate(found):
        if row:
          writer.write(step, row, i if len(found) > 1 else None)
    if progress:
      progress.update(step, self.metrics[0])
    better = bool(test and saver.keep.best and saver.beats_best(evaluated))
    if save or better or stopping:
      with clock.paused():
        if writer:
          writer.flush()
        meta = {
          "metrics": _finite(evaluated),
          "running": self.sums.running(),
          "ended": {str(i): how for i, how in self.ended.items()},
        }
        saver.save(step, self.layout.single(state), meta)
        self.saved = step
    if stopping and not end:
      saver.wait()
      raise Stopped(f"{self.stop} at step {step}; the same command goes on from there")

  def _evaluate(self, state, end: bool):
    """Returns the metrics of each member that goes on, on validation data (at the end
    on test data too; without validation data on test data, for the curve only)."""
    data = self.job.datasets
    splits = {"val": [d.val for d in data]} if data[0].val is not None else {}
    if end or not splits:
      splits["test"] = [d.test for d in data]
    found = [{} for _ in data]
    size = self.job.config.data.eval_batch_size
    for suffix, name in (("", "params"), ("_ema", "ema")):
      if name not in state:
        continue
      for split, parts in splits.items():
        values = evaluate.values(self.layout, state[name], self.hypers, parts, size)
        for member, value in enumerate(values):
          if member not in self.ended:
            for key, number in evaluate.metrics(value).items():
              found[member][f"{split}{suffix}/{key}"] = number
    return found

  def _finish(self, state):
    """Returns the last metrics by member; a finished run that is started again
    evaluates nothing it has not to."""
    if not self.metrics:
      scores = self._evaluate(state, end=True)
      self.metrics = dict(enumerate(scores))
    return {m.name: self.metrics.get(i, {}) for i, m in enumerate(self.job.members)}

  def _first_state(self):
    """Returns the newest whole state of the folder, or a new one, and its step."""
    template = self.layout.abstract(self.job.hypers)
    found = checkpoint.newest_whole(self.folder, template)
    if found is not None:
      step, state, meta = found
      self.sums.restore(meta["running"])
      for member, how in meta["ended"].items():
        self._end(int(member), how)
      if jax.process_index() == 0:
        for name in checkpoint.set_aside(self.folder, step):
          logging.warning("a damaged step lies aside as %s", name)
      return self.layout.place(state), step
    if checkpoint.steps(self.folder):
      raise ConfigError(
        f"{self.folder} has checkpoints but none is whole; try another --workdir"
      )
    state = self.layout.init(self.job.hypers)
    if self.job.config.init.source is not None:
      state = transfer.start_from(
        self.job.config.init,
        state,
        self.layout,
        self.job.data.classes,
        [m.config.seed for m in self.job.members],
        self.job.data.fingerprint,
      )
    return state, 0

  def _note_diverged(self, history):
    """Ends each member at its first step whose loss or gradient is not finite.

    Raises:
      Diverged: none is left.
    """
    for first, values in history:
      for member, finite in enumerate(values["finite"]):
        if member not in self.ended and not finite.all():
          self._diverge(member, first, {n: v[member] for n, v in values.items()})

  def _diverge(self, member, first, values):
    k = int(np.argmin(values["finite"]))
    step, alone = first + k, len(self.job.members) == 1
    loss, norm = float(values["loss"][k]), float(values["gradient_norm"][k])
    message = (
      f"step {step + 1}{'' if alone else f', member {self.job.members[member].name}'}: "
      f"loss {loss}, gradient norm {norm} (examples "
      f"{listed(self.source.examples(step, member))})"
    )
    hint = "Try a lower optim.lr, a longer optim.warmup, or optim.clip_norm"
    self._end(member, {"step": step, "reason": "diverged", "message": message})
    if any(i not in self.ended for i in range(len(self.job.members))):
      logging.warning("%s; it goes on no more. %s", message, hint)
      return
    self.step = step  # the good steps, which the status tells
    kept = f"step {self.saved} is saved" if self.saved else "nothing was saved before"
    raise Diverged(f"{message}; {kept}. {hint}")

  def _drop(self, scores):
    """Ends the members that are not among the best at this rung."""
    left = [i for i in range(len(self.job.members)) if i not in self.ended]

    def order(member):
      found = scores[member]
      return -found.get("val/accuracy", 0.0), found["val/loss"], member

    keep = self.job.schedule.rungs[self.step]
    for place, member in enumerate(sorted(left, key=order)):
      if place >= keep:
        message = f"number {place + 1} of {len(left)} at step {self.step}"
        self._end(member, {"step": self.step, "reason": "dropped", "message": message})

  def _end(self, member, how):
    """Takes a member out of the race; its state stays as it is."""
    self.ended[member] = how
    self.status.end_member(self.job.members[member].name, how)
    active = np.array([i not in self.ended for i in range(len(self.job.members))])
    self.hypers = self.layout.put({**self.job.hypers, "active": active})

  @contextlib.contextmanager
  def _signals(self):
    """Notes SIGTERM and the first Ctrl-C; a second Ctrl-C interrupts at once."""

    def note(name):
      self.stop = name
      signal.signal(signal.SIGINT, old[signal.SIGINT])

    with signals.handled(note, signal.SIGTERM, signal.SIGINT) as old:
      yield

  def _asked_to_stop(self) -> bool:
    """Whether any process got a signal; all of them answer alike."""
    if jax.process_count() == 1:
      return self.stop is not None
    from jax.experimental import multihost_utils

    flags = multihost_utils.process_allgather(np.array(self.stop is not None))
    if flags.any() and self.stop is None:
      self.stop = "a signal to another process"
    return bool(flags.any())


@contextlib.contextmanager
def _main_only(make):
  """Opens what only the first process writes; None elsewhere."""
  if jax.process_index() != 0:
    yield None
    return
  with make() as opened:
    yield opened


def _finite(metrics):
  return {n: v if math.isfinite(v) else None for n, v in metrics.items()}

"""From a data set to the batches of a call of the training program."""

import jax
import numpy as np

from vit_jax import devices
from vit_jax.data import batches


def make(job, layout, step: int):
  """Returns the batches of a run from this step on: `next(step, count)` gives those of
  a call, `data` what lies on the device, `examples(step, member)` the numbers of the
  examples of one step.

  Args:
    job: the run (`train.Job`).
    layout: of `devices.make`.
    step: where a stream begins.
  """
  splits = [d.train for d in job.datasets]
  orders = [batches.Order(m.config.seed, len(splits[0])) for m in job.members]
  size, per_call = job.config.data.batch_size, job.config.train.steps_per_call
  if batches.is_resident(splits[0]):
    return Resident(layout, splits, orders, size, per_call)
  return Streamed(layout, splits[0], orders, size, per_call, step, job.schedule.total)


class Resident:
  """Batches as example numbers into data that lies on the device."""

  def __init__(self, layout, splits, orders, size, per_call):
    self._layout, self._orders, self._size = layout, orders, size
    self._steps = per_call
    shared, own = batches.resident(splits)
    self.data = (layout.put(own), layout.put(shared))

  def next(self, step, count):
    """Returns the batches of `count` steps; always K of them, so that one program
    serves all lengths (the rest is not read)."""
    del count
    numbers = batches.index_batches(self._orders, step, self._steps, self._size)
    return self._layout.put(numbers, 2)

  def examples(self, step, member):
    numbers = batches.index_batches([self._orders[member]], step, 1, self._size)
    return numbers["index"][0, 0].tolist()


class Streamed:
  """Batches read from disk."""

  def __init__(self, layout, split, orders, size, per_call, step, total):
    self._layout, self._order, self._size = layout, orders[0], size
    self._steps, self._members = per_call, len(orders)
    self.data = ({}, {})
    own = devices.own_rows(size)
    self._stream = batches.Stream(
      split, orders[0], step=step, size=size, own=own, total=total
    )

  def next(self, step, count):
    del step
    batch = self._stream.next(count)
    missing = self._steps - count

    def widened(leaf):
      """[K B ...] -> [S K B ...], K filled up to that of a full call."""
      leaf = np.pad(leaf, ((0, missing), *[(0, 0)] * (leaf.ndim - 1)))
      return np.broadcast_to(leaf, (self._members, *leaf.shape))

    return self._layout.put_own(jax.tree.map(widened, batch), 2)

  def examples(self, step, member):
    del member
    return self._order.at(step * self._size + np.arange(self._size)).tolist()

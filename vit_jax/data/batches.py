"""Which examples make the batch of a step, and how they reach the device.

The batch of a step is a function of seed and step: there is no reader to save, and the
order does not depend on devices, processes or where a run was interrupted.
"""

import functools

import numpy as np

from vit_jax.data.datasets import Split, generator


class Order:
  """The order of the training examples.

  Positions are counted over the whole run. Every n of them are one epoch: a permutation
  of the n examples, drawn anew for each epoch. Batches may span two epochs, so that no
  example is dropped or repeated within an epoch.
  """

  def __init__(self, seed: int, examples: int):
    self.examples = examples
    # A batch touches two epochs; prefetching threads may be one further.
    self._permutation = functools.lru_cache(maxsize=4)(
      lambda epoch: permutation(seed, epoch, examples)
    )

  def at(self, positions: np.ndarray) -> np.ndarray:
    """Returns the example at each position of the run, int32."""
    positions = np.asarray(positions)
    epochs, places = np.divmod(positions, self.examples)
    out = np.empty(positions.shape, np.int32)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      out[here] = self._permutation(int(epoch))[places[here]]
    return out


def permutation(seed: int, epoch: int, examples: int) -> np.ndarray:
  """Returns the order of an epoch, int32: the ranks of raw Philox numbers, which NumPy
  keeps the same in every version (those of `Generator.permutation` need not be)."""
  rank = generator(seed, f"order {epoch}").bit_generator.random_raw(examples)
  return np.argsort(rank, kind="stable").astype(np.int32)


def is_resident(split: Split) -> bool:
  """Whether a split lies on the device as a whole; a lazy sequence of images streams."""
  return isinstance(split.images, np.ndarray)


def resident(splits: list[Split]) -> tuple[dict, dict]:
  """Returns the images and labels of the members, `(one for all, [S ...] each)`: the
  latter only where splits differ, as they do where a seed draws them."""
  if all(split is splits[0] for split in splits):
    first = splits[0]
    return {"image": np.asarray(first.images), "label": first.labels}, {}
  return {}, {
    "image": np.stack([split.images for split in splits]),
    "label": np.stack([split.labels for split in splits]),
  }


def index_batches(orders: list[Order], step: int, count: int, size: int) -> dict:
  """Returns the batches of `count` steps from `step` on, as example numbers, [S, K, B]."""
  positions = (step + np.arange(count))[:, None] * size + np.arange(size)
  index = np.stack([order.at(positions) for order in orders])
  return {"index": index, **rows(index.shape)}


def rows(shape, first: int = 0) -> dict:
  """Returns row numbers in the global batch and weights of 1, of shape [..., B]."""
  numbers = np.arange(first, first + shape[-1], dtype=np.int32)
  return {
    "row": np.broadcast_to(numbers, shape),
    "weight": np.ones(shape, np.float32),
  }


class Stream:
  """Batches of a set too large for the device, read ahead by threads (Grain).

  Each process reads its own rows only. An unreadable image that the source may skip
  (it returns None) gets weight 0.
  """

  def __init__(
    self,
    split: Split,
    order: Order,
    *,
    step: int,
    size: int,
    own: slice,
    total: int,
    threads: int = 8,
    ahead: int = 4,
  ):
    import grain

    local = own.stop - own.start
    positions = _Positions(split, order, size, own, total)
    options = grain.ReadOptions(
      num_threads=threads, prefetch_buffer_size=max(local, 1) * ahead
    )
    examples = grain.MapDataset.source(positions)[step * local :]
    self._batches = iter(examples.to_iter_dataset(options).batch(local))
    self._first = own.start

  def next(self, count: int) -> dict:
    """Returns the next `count` batches, [K, B of this process, ...]."""
    parts = [next(self._batches) for _ in range(count)]
    batch = {name: np.stack([p[name] for p in parts]) for name in parts[0]}
    batch["row"] = rows(batch["label"].shape, self._first)["row"]
    return batch


class _Positions:
  """Grain's view of the run: a random-access source of its positions."""

  def __init__(self, split, order, size, own, total):
    self._split, self._order, self._size, self._own = split, order, size, own
    self._local = own.stop - own.start
    self._total = total

  def __len__(self):
    return self._total * self._local

  def __getitem__(self, i):
    step, row = divmod(int(i), self._local)
    position = step * self._size + self._own.start + row
    example = int(self._order.at(np.array([position]))[0])
    image = self._split.images[example]
    weight = np.float32(image is not None)
    if image is None:
      image = np.zeros(self._split.images.shape[1:], np.uint8)
    return {
      "image": image,
      "label": np.int32(self._split.labels[example]),
      "weight": weight,
    }

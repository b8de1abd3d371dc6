"""What a source of images returns: `Split`s, and the `Dataset` they make."""

import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """Images and their labels.

  Attributes:
    images: uint8 [n, h, w, c], possibly read-only; or, for a set that does not fit in
      memory, a lazy sequence: `len`, `[i] -> uint8 [h, w, c]` from any thread, and
      `.shape == (n, h, w, c)`, `.take(rows)`.
    labels: int32 [n]; -1: unlabelled.
  """

  images: np.ndarray
  labels: np.ndarray

  def __len__(self):
    return len(self.labels)

  def take(self, rows: np.ndarray) -> "Split":
    """Returns these rows, in this order."""
    if isinstance(self.images, np.ndarray):
      return Split(self.images[rows], self.labels[rows])
    return Split(self.images.take(rows), self.labels[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """An image set.

  Attributes:
    name: as in `config.data.name`.
    train: what to learn from; every label is known.
    val: cut from train (`config.data.val`) or the source's own; None: there is none.
    test: what to report on; labels may be -1 (unlabelled).
    classes: name of each label.
    mean: of each channel; normalised = (pixel / 255 - mean) / std.
    std: of each channel.
    fingerprint: sha256 (hex) of what the source holds, before resizing and before any
      split that `seed` draws. In memory: every image and label (a folder or TFDS set:
      every undecoded picture in order, labels, class names). Lazy: path and size of
      every file, or version and shard sizes of a TFDS set.
    skipped: images left out because they could not be read.
    note: what a reader of the results should know; None: nothing.
  """

  name: str
  train: Split
  val: Split | None
  test: Split
  classes: tuple[str, ...]
  mean: tuple[float, ...]
  std: tuple[float, ...]
  fingerprint: str
  skipped: int = 0
  note: str | None = None


def generator(seed: int, purpose: str) -> np.random.Generator:
  """Returns NumPy's Philox generator for one purpose, from a seed of any size."""
  digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
  return np.random.Generator(
    np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
  )

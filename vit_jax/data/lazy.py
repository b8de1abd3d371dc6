"""Images that are made at each access, and when they are decoded to an array at once.

What fits in `MEMORY` bytes is decoded once to one uint8 array. What does not stays a
lazy sequence, which makes one picture at each `[i]`, from any thread.
"""

import dataclasses
import hashlib
import math
from pathlib import Path

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import images as pictures
from vit_jax.data.split import Split

# Largest set (train, validation and test, decoded) that is held as one array, in bytes.
MEMORY = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
  """An array whose images are resized at each access; safe from threads.

  Attributes:
    images: uint8 [n, h, w, c].
    size: (height, width) of what `[i]` returns.
    interpolation: as `data.interpolation`.
  """

  images: np.ndarray
  size: tuple[int, int]
  interpolation: str

  @property
  def shape(self):
    return (len(self.images), *self.size, self.images.shape[3])

  def __len__(self):
    return len(self.images)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]."""
    return pictures.resize(self.images[i], self.size, self.interpolation)

  def take(self, rows) -> "Resized":
    return dataclasses.replace(self, images=self.images[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
  """Picture files, decoded at each access; safe from threads.

  Attributes:
    paths: one a picture.
    size: (height, width) of what `[i]` returns.
    channels: 1 or 3.
    interpolation: as `data.interpolation`.
  """

  paths: tuple[str, ...]
  size: tuple[int, int]
  channels: int
  interpolation: str

  @property
  def shape(self):
    return (len(self.paths), *self.size, self.channels)

  def __len__(self):
    return len(self.paths)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]; raises `images.ImageError` that names the file."""
    return pictures.read(
      self.paths[i],
      size=self.size,
      channels=self.channels,
      interpolation=self.interpolation,
    )

  def content(self, i) -> bytes:
    """Returns the undecoded bytes."""
    return Path(self.paths[i]).read_bytes()

  def take(self, rows) -> "Files":
    return dataclasses.replace(self, paths=tuple(self.paths[i] for i in rows))


def fits(splits: dict[str, Split]) -> bool:
  """Whether all of these images fit in memory as arrays."""
  return sum(math.prod(split.images.shape) for split in splits.values()) <= MEMORY


def decoded(
  data: config.Data, splits: dict[str, Split]
) -> tuple[dict[str, Split], int]:
  """Decodes what fits in memory; handles pictures that cannot be read.

  Args:
    data: says what to do with unreadable pictures.
    splits: name -> `Split` of images made at access.

  Returns:
    (the same with arrays where they fit, number of pictures left out). In "skip" every
    picture is decoded once here, also of a set that stays lazy, so that the count is
    right and no row changes its place later.
  """
  whole = fits(splits)
  if not whole and data.unreadable == "refuse":
    return splits, 0
  out, bad = {}, []
  for name, split in splits.items():
    array = np.empty(split.images.shape if whole else (0,), np.uint8)

    def fill(i, images=split.images, array=array):
      try:
        pixels = images[i]
      except (pictures.ImageError, OSError) as error:
        return str(error)
      if whole:
        array[i] = pixels
      return None

    reasons = pictures.in_threads(fill, range(len(split)))
    bad += [reason for reason in reasons if reason is not None]
    good = np.array([reason is None for reason in reasons], bool)
    if whole:
      array = array if good.all() else array[good]
      out[name] = Split(array, split.labels[good])
    else:
      out[name] = split.take(np.flatnonzero(good))
  if bad and data.unreadable == "refuse":
    shown = "; ".join(bad[:5]) + ("; ..." if len(bad) > 5 else "")
    raise ConfigError(
      f"{len(bad)} pictures cannot be read: {shown}; scripts/prepare_data.py --check "
      'lists all, data.unreadable="skip" leaves them out'
    )
  return out, len(bad)


def content_fingerprint(splits: dict[str, Split], classes: tuple[str, ...]) -> str:
  """sha256 of every undecoded picture, its label and the class names."""
  digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
  for name, split in sorted(splits.items()):
    digest.update(f"{name}{len(split)}".encode() + split.labels.tobytes())
    for i in range(len(split)):
      try:
        content = split.images.content(i)
      except OSError:  # `decoded` counts or refuses it
        content = b""
      digest.update(hashlib.sha256(content).digest())
  return digest.hexdigest()

"""Named image sets: `load(config.data, seed)` returns train, validation and test.

One small function a source, found through the literal dict `SOURCES`. A source says
what it holds (`split`); what is common to all is done once in `load`: resizing, checking
labels, cutting the validation split, leaving out training images. Nothing here imports JAX or TensorFlow.
"""

import dataclasses

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import arrays, cifar, folder, lazy, tfds
from vit_jax.data.split import Dataset, Split, generator

# Each takes (data, seed) and returns a `Dataset`.
SOURCES = {
  "digits": arrays.digits,
  "digits:half": arrays.digits_half,
  "mnist": arrays.mnist,
  "fashion_mnist": arrays.fashion_mnist,
  "cifar10": cifar.load,
  "cifar100": cifar.load,
  "folder": folder.load,
  "tfds:NAME": tfds.load,
  "synthetic": arrays.synthetic,
}
# Those whose test images are drawn by the seed.
DRAWN_BY_SEED = ("digits",)
# Those that come with a package or are made up.
WITHOUT_FILES = ("digits", "digits:half", "synthetic")


def load(data: config.Data, seed: int) -> Dataset:
  """Loads the image set that `data` describes.

  Args:
    data: which set, from where, at what size, how much of train is for validation, and
      how much of the rest is used.
    seed: any non-negative integer; draws the validation split, the training images that
      are used, and the test split of "digits".

  Returns:
    The set, resized to `data.image_size` where that is given.

  Raises:
    ConfigError: an unknown name, missing or damaged files, unusable labels or sizes.
  """
  prefix, separator, _ = data.name.partition(":")
  key = "tfds:NAME" if prefix == "tfds" and separator else data.name
  if key not in SOURCES:
    raise ConfigError(
      f"data.name={data.name!r} is no data set{config.nearest(data.name, SOURCES)}"
    )
  if data.dir is not None and key in WITHOUT_FILES:
    raise ConfigError(f"data.name={data.name!r} reads no files; leave data.dir out")
  if data.dir == "":
    raise ConfigError('data.dir="" is empty; try "." or leave it out')
  if data.image_size is not None and min(data.image_size) < 1:
    raise ConfigError(
      f"data.image_size={tuple(data.image_size)}: expected 1 pixel or more"
    )
  found = SOURCES[key](data, seed)
  _check(found)
  if data.image_size is not None:
    found = _resized(found, tuple(data.image_size), data.interpolation)
  _check_sizes(found)
  return _reduced(_with_validation(found, data.val, seed), data.train_size, seed)


def cut(
  labels: np.ndarray,
  amount: float,
  seed: int,
  setting: str = "data.val",
  purpose: str = "validation split",
) -> tuple[np.ndarray, np.ndarray]:
  """Parts rows in two, with the same share of every class (largest remainders).

  Args:
    labels: int [n].
    amount: share (below 1) or number (from 1) of rows to cut off.
    seed: any non-negative integer.
    setting: that `amount` comes from, for messages.
    purpose: what is drawn; draws for different purposes are independent.

  Returns:
    (rows kept, rows cut off), each ascending; together 0..n-1.

  Raises:
    ConfigError: an amount that leaves no row on one side.
  """
  n = len(labels)
  if amount >= 1 and amount != int(amount):
    raise ConfigError(f"{setting}={amount}: expected a share below 1 or a whole number")
  number = int(amount) if amount >= 1 else round(amount * n)
  if not 0 < number < n:
    raise ConfigError(
      f"{setting}={amount:g} takes {number} of {n} training images; expected 1 to {n - 1}"
    )
  values, sizes = np.unique(labels, return_counts=True)
  # In integers, so that a share like 0.3 rounds alike everywhere.
  whole, remainder = np.divmod(sizes * number, n)
  largest = np.argsort(-remainder, kind="stable")[: number - whole.sum()]
  whole[largest] += 1
  # The raw numbers of a bit generator stay the same in every version of NumPy (NEP 19);
  # those of `permutation` need not, and a resumed run must not train on images that
  # it kept for validation.
  rank = generator(seed, purpose).bit_generator.random_raw(n)
  taken = np.zeros(n, bool)
  for value, count in zip(values, whole):
    rows = np.flatnonzero(labels == value)
    taken[rows[np.argsort(rank[rows], kind="stable")[:count]]] = True
  return np.flatnonzero(~taken), np.flatnonzero(taken)


def _splits(dataset):
  return {"train": dataset.train, "val": dataset.val, "test": dataset.test}


def _check_sizes(dataset):
  shapes = {
    name: "x".join(map(str, split.images.shape[1:]))
    for name, split in _splits(dataset).items()
    if split is not None
  }
  if len(set(shapes.values())) > 1:
    found = ", ".join(f"{name} has {shape}" for name, shape in shapes.items())
    raise ConfigError(
      f"data.name={dataset.name!r}: images differ in size: {found}; set data.image_size"
    )


def _check(dataset):
  """Refuses empty splits, classes that share a name, and labels that would be learned or
  counted wrongly."""
  twice = sorted({c for c in dataset.classes if dataset.classes.count(c) > 1})
  if twice:
    raise ConfigError(f"data.name={dataset.name!r}: several classes are called {twice}")
  for name, split in _splits(dataset).items():
    if split is None:
      continue
    if not len(split):
      raise ConfigError(f"data.name={dataset.name!r}: the {name} split has no images")
    low, high = split.labels.min(), split.labels.max()
    if low < -1 or high >= len(dataset.classes):
      raise ConfigError(
        f"data.name={dataset.name!r}: labels of {name} go from {low} to {high}, "
        f"expected 0 to {len(dataset.classes) - 1} (-1: unlabelled)"
      )
  unlabelled = int((dataset.train.labels < 0).sum())
  if unlabelled:
    raise ConfigError(
      f"data.name={dataset.name!r}: {unlabelled} of {len(dataset.train)} training "
      "images are unlabelled (-1); training needs a label for each"
    )
  if (dataset.test.labels < 0).all():
    raise ConfigError(
      f"data.name={dataset.name!r}: no test image has a label, so that nothing could be "
      "measured"
    )


def _resized(dataset, size, interpolation):
  """Arrays are resized here; lazy sequences were told their size by their source."""
  splits = {
    name: Split(lazy.Resized(split.images, size, interpolation), split.labels)
    for name, split in _splits(dataset).items()
    if split is not None
    and isinstance(split.images, np.ndarray)
    and split.images.shape[1:3] != size
  }
  if lazy.fits(splits):
    for name, split in splits.items():
      out = np.empty(split.images.shape, np.uint8)
      for row, image in enumerate(split.images):
        out[row] = image
      splits[name] = Split(out, split.labels)
  return dataclasses.replace(dataset, **splits)


def _with_validation(dataset, amount, seed):
  if not amount:
    return dataset
  if dataset.val is not None:
    text = f"{len(dataset.val)} images of its own for validation; data.val cuts no more"
    return dataclasses.replace(
      dataset, note="; ".join(filter(None, (dataset.note, text)))
    )
  kept, taken = cut(dataset.train.labels, amount, seed)
  return dataclasses.replace(
    dataset, train=dataset.train.take(kept), val=dataset.train.take(taken)
  )


def _reduced(dataset, amount, seed):
  if amount is None or amount == len(dataset.train):
    return dataset
  _, taken = cut(
    dataset.train.labels, amount, seed, "data.train_size", "training images"
  )
  return dataclasses.replace(dataset, train=dataset.train.take(taken))

"""TFDS sets prepared as array_record, read without TensorFlow."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import images as pictures
from vit_jax.data import lazy
from vit_jax.data.arrays import MOMENTS
from vit_jax.data.split import Dataset, Split


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """Pictures of a TFDS data source, decoded at each access; safe from threads.

  Attributes:
    source: `[k] -> {"image": bytes, "label": int}`.
    rows: int [n]; which records, in which order.
    name: for messages.
    size: (height, width) of what `[i]` returns.
    channels: 1 or 3.
    interpolation: as `data.interpolation`.
  """

  source: Any
  rows: np.ndarray
  name: str
  size: tuple[int, int]
  channels: int
  interpolation: str

  @property
  def shape(self):
    return (len(self.rows), *self.size, self.channels)

  def __len__(self):
    return len(self.rows)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]; raises `images.ImageError` that names the record."""
    try:
      return pictures.read(
        self.content(i),
        size=self.size,
        channels=self.channels,
        interpolation=self.interpolation,
      )
    except pictures.ImageError as error:
      raise pictures.ImageError(f"{self.name} record {self.rows[i]}: {error}") from None

  def content(self, i) -> bytes:
    """Returns the undecoded bytes."""
    return self.source[int(self.rows[i])]["image"]

  def take(self, rows) -> "Records":
    return dataclasses.replace(self, rows=self.rows[rows])


def load(data: config.Data, seed: int) -> Dataset:
  """A TFDS set prepared as array_record, read without TensorFlow.

  Splits: train; test, or validation where test is missing or wholly unlabelled (as in
  imagenet2012); otherwise validation is the validation split. The labels are read ahead
  of training, and with them, once, every record.

  Raises:
    ConfigError: an unknown or unprepared set, or one that is not images with one label.
  """
  del seed
  import tensorflow_datasets as tfds  # 1 s, and only this source needs it

  builder = _builder(tfds, data)
  size, channels = _size(tfds, builder.info.features, data)
  sources = _sources(tfds, builder, data)
  described = _description(builder, sorted(sources))
  labels = {split: _labels(source) for split, source in sources.items()}
  note = None
  if "test" in sources and "validation" in sources and (labels["test"] < 0).all():
    del sources["test"]
    note = "the test split is unlabelled; validation is used as test"
  if "test" in sources:
    roles = {"train": "train", "test": "test", "val": "validation"}
  else:
    roles = {"train": "train", "test": "validation"}
  splits = {
    role: Split(
      Records(
        sources[split],
        np.arange(len(sources[split])),
        f"{data.name} {split}",
        size,
        channels,
        data.interpolation,
      ),
      labels[split],
    )
    for role, split in roles.items()
    if split in sources
  }
  classes = tuple(builder.info.features["label"].names)
  if lazy.fits(splits):
    fingerprint = lazy.content_fingerprint(splits, classes)
  else:
    fingerprint = hashlib.sha256(described.encode()).hexdigest()
  splits, skipped = lazy.decoded(data, splits)
  mean = std = (0.5,) * channels
  if builder.name in MOMENTS:
    mean, std = MOMENTS[builder.name]
  return Dataset(
    name=data.name,
    train=splits["train"],
    val=splits.get("val"),
    test=splits["test"],
    classes=classes,
    mean=mean,
    std=std,
    fingerprint=fingerprint,
    skipped=skipped,
    note=note,
  )


def _builder(tfds, data):
  name = data.name.removeprefix("tfds:")
  try:
    builder = tfds.builder(name, data_dir=data.dir)
  except (tfds.core.DatasetNotFoundError, AssertionError, ValueError) as error:
    text = " ".join(str(error).split("\n", 1)[0].split())
    known = tfds.list_builders(with_community_datasets=False)
    raise ConfigError(
      f"data.name={data.name!r}: {text}{config.nearest(name, known)[:200]}"
    ) from None
  if not builder.info.splits:
    raise ConfigError(
      f"data.name={data.name!r} is not prepared in {builder.data_dir}; {_prepare(data)}"
    )
  return builder


def _size(tfds, features, data):
  """Returns (height, width), channels of the images; refuses what has no such."""
  if not (
    {"image", "label"} <= set(features)
    and isinstance(features["image"], tfds.features.Image)
    and isinstance(features["label"], tfds.features.ClassLabel)
  ):
    raise ConfigError(
      f"data.name={data.name!r} has features {sorted(features)}; expected an image "
      "named 'image' and a class named 'label'"
    )
  height, width, channels = features["image"].shape
  size = data.image_size and tuple(data.image_size)
  if size is None:
    if height is None or width is None:
      raise ConfigError(
        f"data.name={data.name!r} has images of many sizes: set data.image_size"
      )
    size = (height, width)
  return size, 1 if channels == 1 else 3


def _sources(tfds, builder, data):
  """Returns split -> data source of undecoded records."""
  found = set(builder.info.splits)
  if "train" not in found or not found & {"test", "validation"}:
    raise ConfigError(
      f"data.name={data.name!r} has splits {sorted(found)}; expected train and test or "
      "validation"
    )
  # Undecoded, so that pictures of every source go through the same decoder.
  encoded = {"image": tfds.decode.SkipDecoding()}
  sources = {}
  for split in sorted(found & {"train", "test", "validation"}):
    try:
      sources[split] = builder.as_data_source(split=split, decoders=encoded)
    except NotImplementedError:
      raise ConfigError(
        f"data.name={data.name!r} is prepared as {builder.info.file_format.value}, "
        f"which has no random access; {_prepare(data)}"
      ) from None
  return sources


def _prepare(data):
  name = data.name.removeprefix("tfds:")
  where = f" --data_dir={data.dir}" if data.dir else ""
  return f"try `python scripts/prepare_data.py --dataset={name}{where}`"


def _description(builder, splits):
  """What tells one prepared set from another without reading it: text."""
  lines = [builder.info.full_name]
  for split in splits:
    info = builder.info.splits[split]
    lines.append(f"{split} {list(info.shard_lengths)} {int(info.num_bytes)}")
  return "\n".join(lines)


def _labels(source):
  """Returns int32 [n]. Labels lie among the images, so this reads the whole split."""
  labels = np.empty(len(source), np.int32)
  for start in range(0, len(source), 256):  # array_record reads a block in parallel
    rows = list(range(start, min(start + 256, len(source))))
    labels[rows] = [record["label"] for record in source.__getitems__(rows)]
  return labels

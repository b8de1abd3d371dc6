"""Named image sets: `load(config.data, seed)` returns train, validation and test.

One small function a source, found through the literal dict `SOURCES`. A source says
what it holds; what is common to all is done once in `load`: resizing, checking labels,
cutting the validation split. Nothing here imports JAX or TensorFlow.

What fits in `MEMORY` bytes is decoded once to one uint8 array. What does not is a lazy
sequence (`Files`, `Records`, `Resized`) that makes one picture at each `[i]`, from any
thread.
"""

import dataclasses
import gzip
import hashlib
import io
import math
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import images as pictures

# Largest set (train, validation and test, decoded) that is held as one array.
MEMORY = 1 << 30
# Largest array an idx file may declare; the largest of the family, EMNIST, has 638 MB.
IDX_LIMIT = 1 << 30
# Records from which the labels of a TFDS set are kept in a file of their own.
LABELS_KEPT_FROM = 200_000
# Deflate cannot expand by more than this, so a file that declares more is lying.
DEFLATE_LIMIT = 1032

# (mean, standard deviation) of each channel over the training images, in units of
# pixel / 255, as the field writes them; digits: over all 1797 images, computed here.
MOMENTS = {
  "digits": ((0.3053,), (0.3759,)),
  "mnist": ((0.1307,), (0.3081,)),
  "fashion_mnist": ((0.2860,), (0.3530,)),
  "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
  "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
DIGITS = tuple(str(k) for k in range(10))
CLOTHES = (
  "T-shirt/top",
  "Trouser",
  "Pullover",
  "Dress",
  "Coat",
  "Sandal",
  "Shirt",
  "Sneaker",
  "Bag",
  "Ankle boot",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """Images and their labels.

  Attributes:
    images: uint8 [n, h, w, c], possibly read-only; or, for a set that does not fit in
      memory, a lazy sequence: `len`, `[i] -> uint8 [h, w, c]` from any thread, and
      `.shape == (n, h, w, c)`.
    labels: int32 [n]; -1: unlabelled.
  """

  images: np.ndarray
  labels: np.ndarray

  def __len__(self):
    return len(self.labels)


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


def load(data: config.Data, seed: int) -> Dataset:
  """Loads the image set that `data` describes.

  Args:
    data: which set, from where, at what size, how much of train is for validation.
    seed: any non-negative integer; draws the validation split (and the test split of
      "digits").

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
  if data.image_size is not None and min(data.image_size) < 1:
    raise ConfigError(
      f"data.image_size={tuple(data.image_size)}: expected 1 pixel or more"
    )
  found = SOURCES[key](data, seed)
  _check(found)
  if data.image_size is not None:
    found = _resized(found, tuple(data.image_size))
  return _with_validation(found, data.val, seed)


def cut(labels: np.ndarray, amount: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Parts rows in two, with the same share of every class (largest remainders).

  Args:
    labels: int [n].
    amount: share (below 1) or number (from 1) of rows to cut off.
    seed: any non-negative integer.

  Returns:
    (rows kept, rows cut off), each ascending; together 0..n-1.

  Raises:
    ConfigError: an amount that leaves no row on one side.
  """
  n = len(labels)
  if amount >= 1 and amount != int(amount):
    raise ConfigError(f"data.val={amount}: expected a share below 1 or a whole number")
  number = int(amount) if amount >= 1 else round(amount * n)
  if not 0 < number < n:
    raise ConfigError(
      f"data.val={amount:g} cuts {number} of {n} training images; expected 1 to {n - 1}"
    )
  values, sizes = np.unique(labels, return_counts=True)
  # In integers, so that a share like 0.3 rounds alike everywhere.
  whole, remainder = np.divmod(sizes * number, n)
  largest = np.argsort(-remainder, kind="stable")[: number - whole.sum()]
  whole[largest] += 1
  # The raw numbers of a bit generator stay the same in every version of NumPy (NEP 19);
  # those of `permutation` need not, and a resumed run must not train on images that
  # it kept for validation.
  rank = generator(seed, "validation split").bit_generator.random_raw(n)
  taken = np.zeros(n, bool)
  for value, count in zip(values, whole):
    rows = np.flatnonzero(labels == value)
    taken[rows[np.argsort(rank[rows], kind="stable")[:count]]] = True
  return np.flatnonzero(~taken), np.flatnonzero(taken)


def generator(seed: int, purpose: str) -> np.random.Generator:
  """Returns NumPy's Philox generator for one purpose, from a seed of any size."""
  digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
  return np.random.Generator(
    np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
  )


def _splits(dataset):
  return {"train": dataset.train, "val": dataset.val, "test": dataset.test}


def _check(dataset):
  """Refuses empty splits and labels that would be learned or counted wrongly."""
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


def _resized(dataset, size):
  """Arrays are resized here; lazy sequences were told their size by their source."""
  splits = {
    name: Split(Resized(split.images, size), split.labels)
    for name, split in _splits(dataset).items()
    if split is not None
    and isinstance(split.images, np.ndarray)
    and split.images.shape[1:3] != size
  }
  if _fits(splits):
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
    return dataclasses.replace(dataset, note=_joined(dataset.note, text))
  kept, taken = cut(dataset.train.labels, amount, seed)
  return dataclasses.replace(
    dataset, train=_rows(dataset.train, kept), val=_rows(dataset.train, taken)
  )


def _rows(split, rows):
  if isinstance(split.images, np.ndarray):
    return Split(split.images[rows], split.labels[rows])
  return Split(split.images.take(rows), split.labels[rows])


def _joined(*texts):
  return "; ".join(t for t in texts if t) or None


def _fingerprint(*arrays) -> str:
  """sha256 of shapes and bytes of arrays, in order."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def _in_memory(name, train, test, classes, moments, note=None):
  return Dataset(
    name=name,
    train=train,
    val=None,
    test=test,
    classes=tuple(classes),
    mean=moments[0],
    std=moments[1],
    fingerprint=_fingerprint(train.images, train.labels, test.images, test.labels),
    note=note,
  )


# --- digits ---------------------------------------------------------------------------


def _all_digits():
  """The 1797 scanned digits of scikit-learn: uint8 [n, 8, 8, 1], int32 [n]."""
  from sklearn.datasets import load_digits  # 0.5 s, and only this source needs it

  digits = load_digits()
  grey = np.rint(digits.images * 255 / 16).astype(np.uint8)
  return grey[..., None], digits.target.astype(np.int32)


def _digits(data, seed):
  """1437 / 360, the same share of every class, the rows of scikit-learn's own split."""
  from sklearn.model_selection import train_test_split

  grey, labels = _all_digits()
  # scikit-learn takes 32 bits of seed.
  train, test = train_test_split(
    np.arange(len(labels)), test_size=360, stratify=labels, random_state=seed % 2**32
  )
  return _digits_split(data, grey, labels, train, test, None)


def _digits_half(data, seed):
  """First half / second half: the split of scikit-learn's documented example."""
  del seed
  grey, labels = _all_digits()
  rows = np.arange(len(labels))
  note = "the halves were written by different people: expect 2-3 points less"
  return _digits_split(data, grey, labels, rows[:898], rows[898:], note)


def _digits_split(data, grey, labels, train, test, note):
  found = _in_memory(
    data.name,
    Split(grey[train], labels[train]),
    Split(grey[test], labels[test]),
    DIGITS,
    MOMENTS["digits"],
    note,
  )
  # Of the source, so that every seed's split has the same one.
  return dataclasses.replace(found, fingerprint=_fingerprint(grey, labels))


# --- idx files ------------------------------------------------------------------------


def _mnist(data, seed):
  del seed
  hint = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
    "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz there, or set data.dir"
  )
  return _idx_set(data, DIGITS, hint)


def _fashion_mnist(data, seed):
  del seed
  hint = "try `apt-get install dataset-fashion-mnist`, or set data.dir"
  return _idx_set(data, CLOTHES, hint)


def _idx_set(data, classes, hint):
  folder = _find_folder(data, ("train-images-idx3-ubyte",), hint)
  arrays = {}
  for part in ("train", "t10k"):
    image_path = _idx_path(folder, f"{part}-images-idx3-ubyte")
    label_path = _idx_path(folder, f"{part}-labels-idx1-ubyte")
    grey, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(grey) != len(labels):
      raise ConfigError(
        f"{image_path} holds {len(grey)} images but {label_path} {len(labels)} labels"
      )
    arrays[part] = Split(grey[..., None], labels.astype(np.int32))
  return _in_memory(
    data.name, arrays["train"], arrays["t10k"], classes, MOMENTS[data.name]
  )


def _idx_names(stem):
  """The spellings in which the four files are handed round."""
  dotted = stem.replace("-idx", ".idx")
  return [name + end for name in (stem, dotted) for end in ("", ".gz")]


def _idx_path(folder, stem):
  for name in _idx_names(stem):
    if (folder / name).is_file():
      return folder / name
  raise ConfigError(f"{folder} has no {stem} (plain or .gz)")


def usual_folders(name: str) -> list[Path]:
  """Where a source without `data.dir` is looked for, in this order."""
  folders = [
    Path("~/.cache/vit_jax").expanduser() / name,
    Path("data") / name,
    Path("/usr/share/datasets") / name.replace("_", "-"),
  ]
  if os.environ.get("VIT_JAX_DATA"):
    folders.insert(0, Path(os.environ["VIT_JAX_DATA"]) / name)
  return folders


def _find_folder(data, stems, hint):
  """Returns `data.dir`, or the first usual folder that holds one of the files."""
  if data.dir is not None:
    folder = Path(data.dir).expanduser()
    if not folder.is_dir():
      raise ConfigError(f"data.dir={data.dir!r} is not a folder")
    return folder
  folders = usual_folders(data.name)
  wanted = [name for stem in stems for name in _idx_names(stem)]
  for folder in folders:
    if any((folder / name).exists() for name in wanted):
      return folder
  raise ConfigError(
    f"data.name={data.name!r} is not in {', '.join(map(str, folders))}; {hint}"
  )


def read_idx(path: str | os.PathLike, dimensions: int) -> np.ndarray:
  """Reads one idx file of bytes, plain or gzip (found from its content).

  The format (LeCun, "The MNIST database"): two zero bytes, type 0x08 for uint8, the
  number of dimensions, each dimension as a big-endian uint32, then the values.

  Args:
    path: the file.
    dimensions: how many it must have: 3 for images [n, h, w], 1 for labels [n].

  Returns:
    uint8 array of that many dimensions.

  Raises:
    ConfigError: another format, or a size that the file does not hold. What is declared
      is checked against the file before memory is taken.
  """
  size = os.path.getsize(path)
  with open(path, "rb") as raw:
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    file = gzip.GzipFile(fileobj=raw) if packed else raw
    try:
      return _idx_values(
        path, file, size * (DEFLATE_LIMIT if packed else 1), dimensions
      )
    except (OSError, EOFError, zlib.error) as error:
      raise ConfigError(f"{path}: damaged ({error}); fetch it again") from None


def _idx_values(path, file, most, dimensions):
  magic = file.read(4)
  if magic != bytes([0, 0, 8, dimensions]):
    raise ConfigError(
      f"{path} starts with {magic.hex(' ') or 'nothing'}, expected 00 00 08 "
      f"{dimensions:02x} (idx, uint8, {dimensions} dimensions)"
    )
  header = file.read(4 * dimensions)
  if len(header) < 4 * dimensions:
    raise ConfigError(f"{path} ends within its header; fetch it again")
  shape = tuple(int(n) for n in np.frombuffer(header, ">u4"))
  wanted = math.prod(shape)
  if wanted > min(most, IDX_LIMIT):
    raise ConfigError(
      f"{path} declares {'x'.join(map(str, shape))} bytes, more than it can hold"
    )
  values = file.read(wanted)
  rest = file.read(1)
  if len(values) < wanted or rest:
    has = "more than" if rest else f"only {len(values)} of"
    raise ConfigError(
      f"{path} holds {has} the {wanted} bytes it declares; fetch it again"
    )
  return np.frombuffer(values, np.uint8).reshape(shape)


# --- synthetic ------------------------------------------------------------------------


def _synthetic(data, seed):
  """Ten classes of coloured gratings under noise: 320 training and 160 test images.

  A class is an angle of the stripes and a tint; where the stripes start is random. The
  same images whatever the seed, drawn at `data.image_size` (32x32 when None).
  """
  del seed
  height, width = (32, 32) if data.image_size is None else tuple(data.image_size)
  train = _gratings(320, height, width, "synthetic train")
  test = _gratings(160, height, width, "synthetic test")
  return _in_memory("synthetic", train, test, DIGITS, ((0.5,) * 3, (0.5,) * 3))


def _gratings(n, height, width, purpose):
  draw = generator(0, purpose)
  labels = draw.permutation(np.arange(n, dtype=np.int32) % 10)
  y, x = np.mgrid[:height, :width] / max(height, width)
  out = np.empty((n, height, width, 3), np.uint8)
  for row, label in enumerate(labels):
    angle = np.pi * label / 10
    phase = draw.uniform(0, 2 * np.pi)
    wave = np.sin(2 * np.pi * 3 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    tint = np.cos(2 * angle + np.array([0, 2, 4]) * np.pi / 3)
    noise = draw.normal(size=(height, width, 3))
    pixels = 128 + 40 * wave[..., None] + 25 * tint + 20 * noise
    out[row] = np.clip(np.rint(pixels), 0, 255)
  return Split(out, labels)


# --- CIFAR ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cifar:
  """Where things are in a binary CIFAR release (Krizhevsky 2009).

  A record is `label_bytes` bytes, the last of which is the label we use, then 1024
  bytes each of red, green and blue, row by row.
  """

  stem: str
  folder: str
  train: tuple[str, ...]
  test: str
  names: str
  label_bytes: int
  classes: int


_CIFAR = {
  "cifar10": _Cifar(
    stem="cifar-10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
    test="test_batch.bin",
    names="batches.meta.txt",
    label_bytes=1,
    classes=10,
  ),
  "cifar100": _Cifar(
    stem="cifar-100",
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    names="fine_label_names.txt",
    label_bytes=2,  # coarse, fine
    classes=100,
  ),
}
# No file of either release is larger (train.bin of CIFAR-100 has 153,700,000 bytes).
CIFAR_LIMIT = 160_000_000


def _cifar(data, seed):
  del seed
  spec = _CIFAR[data.name]
  place, content = _cifar_content(data, spec)
  classes = tuple(content[spec.names].decode("ascii", "replace").split())
  if len(classes) != spec.classes:
    raise ConfigError(
      f"{place}: {spec.names} has {len(classes)} names, expected {spec.classes}"
    )
  parts = [_cifar_records(place, spec, name, content) for name in spec.train]
  train = Split(*(np.concatenate(arrays) for arrays in zip(*parts)))
  test = Split(*_cifar_records(place, spec, spec.test, content))
  note = None
  if (len(train), len(test)) != (50_000, 10_000):
    note = f"{len(train)} + {len(test)} images; the official set has 50000 + 10000"
  return _in_memory(data.name, train, test, classes, MOMENTS[data.name], note)


def _cifar_records(place, spec, name, content):
  """Bytes of one file -> uint8 [n, 32, 32, 3], int32 [n]."""
  values = np.frombuffer(content[name], np.uint8)
  length = spec.label_bytes + 3072
  if not len(values) or len(values) % length:
    raise ConfigError(
      f"{place}: {name} has {len(values)} bytes, not whole records of {length}; fetch "
      "it again"
    )
  records = values.reshape(-1, length)
  planes = records[:, spec.label_bytes :].reshape(-1, 3, 32, 32)
  labels = records[:, spec.label_bytes - 1].astype(np.int32)
  return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _cifar_content(data, spec):
  """Returns (archive or folder, {file name: bytes}) of the files of the release."""
  archive = f"{spec.stem}-binary.tar.gz"
  wanted = (*spec.train, spec.test, spec.names)
  if data.dir is None:
    places = usual_folders(data.name)
  else:
    places = [Path(data.dir).expanduser()]
  for place in places:
    if place.is_file():
      return place, _from_archive(place, spec, wanted)
    for folder in (place, place / spec.folder):
      if (folder / spec.test).is_file():
        return folder, _from_folder(folder, wanted)
    if (place / archive).is_file():
      return place / archive, _from_archive(place / archive, spec, wanted)
  python = [f"{spec.stem}-python.tar.gz", f"{spec.stem}-python"]
  python += ["cifar-10-batches-py"] if spec.stem == "cifar-10" else []
  there = [str(p / name) for p in places for name in python if (p / name).exists()]
  raise ConfigError(
    f"data.name={data.name!r}: neither {archive} nor {spec.folder}/ in "
    f"{', '.join(map(str, places))}"
    + (f" ({there[0]} is the Python version: pickles are not read)" if there else "")
    + f"; fetch https://www.cs.toronto.edu/~kriz/{archive} and set data.dir"
  )


def _from_folder(folder, wanted):
  content = {}
  for name in wanted:
    path = folder / name
    if not path.is_file():
      raise ConfigError(f"{folder} has no {name}")
    _within_limit(path, path.stat().st_size)
    content[name] = path.read_bytes()
  return content


def _from_archive(path, spec, wanted):
  """Reads members by name into memory; nothing is extracted to disk."""
  content = {}
  try:
    with tarfile.open(path, "r:*") as archive:
      for member in archive:
        folder, _, name = member.name.removeprefix("./").rpartition("/")
        if not member.isfile():
          continue
        if folder in ("cifar-10-batches-py", "cifar-100-python"):
          raise ConfigError(
            f"{path} is the Python version: pickles are not read; fetch "
            f"https://www.cs.toronto.edu/~kriz/{spec.stem}-binary.tar.gz"
          )
        if folder == spec.folder and name in wanted:
          _within_limit(f"{path}: {name}", member.size)
          content[name] = archive.extractfile(member).read()
  except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
    reason = " ".join(str(error).split())
    raise ConfigError(f"{path}: damaged archive ({reason}); fetch it again") from None
  missing = [name for name in wanted if name not in content]
  if missing:
    raise ConfigError(f"{path} has no {spec.folder}/{missing[0]}")
  return content


def _within_limit(name, size):
  if size > CIFAR_LIMIT:
    raise ConfigError(f"{name} has {size} bytes; no file of CIFAR is that large")


# --- lazy sequences -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
  """An array whose images are resized at each access; safe from threads.

  Attributes:
    images: uint8 [n, h, w, c].
    size: (height, width) of what `[i]` returns.
  """

  images: np.ndarray
  size: tuple[int, int]

  @property
  def shape(self):
    return (len(self.images), *self.size, self.images.shape[3])

  def __len__(self):
    return len(self.images)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]."""
    return pictures.resize(self.images[i], self.size)

  def take(self, rows) -> "Resized":
    return Resized(self.images[rows], self.size)


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
  """Picture files, decoded at each access; safe from threads.

  Attributes:
    paths: one a picture.
    size: (height, width) of what `[i]` returns.
    channels: 1 or 3.
  """

  paths: tuple[str, ...]
  size: tuple[int, int]
  channels: int

  @property
  def shape(self):
    return (len(self.paths), *self.size, self.channels)

  def __len__(self):
    return len(self.paths)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]; raises `images.ImageError` that names the file."""
    return pictures.read(self.paths[i], size=self.size, channels=self.channels)

  def content(self, i) -> bytes:
    """Returns the undecoded bytes."""
    return Path(self.paths[i]).read_bytes()

  def take(self, rows) -> "Files":
    return dataclasses.replace(self, paths=tuple(self.paths[i] for i in rows))


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """Pictures of a TFDS data source, decoded at each access; safe from threads.

  Attributes:
    source: `[k] -> {"image": bytes, "label": int}`.
    rows: int [n]; which records, in which order.
    name: for messages.
    size: (height, width) of what `[i]` returns.
    channels: 1 or 3.
  """

  source: Any
  rows: np.ndarray
  name: str
  size: tuple[int, int]
  channels: int

  @property
  def shape(self):
    return (len(self.rows), *self.size, self.channels)

  def __len__(self):
    return len(self.rows)

  def __getitem__(self, i) -> np.ndarray:
    """Returns uint8 [h, w, c]; raises `images.ImageError` that names the record."""
    try:
      return pictures.read(self.content(i), size=self.size, channels=self.channels)
    except pictures.ImageError as error:
      raise pictures.ImageError(f"{self.name} record {self.rows[i]}: {error}") from None

  def content(self, i) -> bytes:
    """Returns the undecoded bytes."""
    return self.source[int(self.rows[i])]["image"]

  def take(self, rows) -> "Records":
    return dataclasses.replace(self, rows=self.rows[rows])


def _decoded(data, splits):
  """Decodes what fits in memory; handles pictures that cannot be read.

  Args:
    data: says what to do with unreadable pictures.
    splits: name -> `Split` of `Files` or `Records`.

  Returns:
    (the same with arrays where they fit, number of pictures left out). In "skip" every
    picture is decoded once here, also of a set that stays lazy, so that the count is
    right and no row changes its place later.
  """
  fits = _fits(splits)
  if not fits and data.unreadable == "refuse":
    return splits, 0
  out, bad = {}, []
  for name, split in splits.items():
    array = np.empty(split.images.shape if fits else (0,), np.uint8)

    def fill(i, images=split.images, array=array):
      try:
        pixels = images[i]
      except (pictures.ImageError, OSError) as error:
        return str(error)
      if fits:
        array[i] = pixels
      return None

    reasons = pictures.in_threads(fill, range(len(split)))
    bad += [reason for reason in reasons if reason is not None]
    good = np.array([reason is None for reason in reasons], bool)
    if fits:
      array = array if good.all() else array[good]
      out[name] = Split(array, split.labels[good])
    else:
      out[name] = _rows(split, np.flatnonzero(good))
  if bad and data.unreadable == "refuse":
    shown = "; ".join(bad[:5]) + ("; ..." if len(bad) > 5 else "")
    raise ConfigError(
      f"{len(bad)} pictures cannot be read: {shown}; scripts/prepare_data.py --check "
      'lists all, data.unreadable="skip" leaves them out'
    )
  return out, len(bad)


def _fits(splits):
  return sum(math.prod(split.images.shape) for split in splits.values()) <= MEMORY


def _content_fingerprint(splits, classes):
  """sha256 of every undecoded picture, its label and the class names."""
  digest = hashlib.sha256("\0".join(classes).encode())
  for name, split in sorted(splits.items()):
    digest.update(f"{name}{len(split)}".encode() + split.labels.tobytes())
    for i in range(len(split)):
      try:
        content = split.images.content(i)
      except OSError:  # `_decoded` counts or refuses it
        content = b""
      digest.update(hashlib.sha256(content).digest())
  return digest.hexdigest()


# --- folder ---------------------------------------------------------------------------


def _folder(data, seed):
  """`dir/train/CLASS/*.png` and `dir/test/CLASS/*.png`.

  `val/` or `validation/` is the validation split, or the test split where there is no
  `test/`. Classes are the folders of train, sorted by name; pictures are sorted by
  path, folders within a class included. Pictures directly in the test folder are
  unlabelled (-1).
  """
  del seed
  if data.dir is None:
    raise ConfigError('data.name="folder" needs data.dir')
  root = Path(data.dir).expanduser()
  tree = folder_tree(root)
  classes = tuple(sorted(name for name in tree["train"].pictures if name))
  listed = {
    role: [(c, path) for c, paths in sorted(found.pictures.items()) for path in paths]
    for role, found in tree.items()
  }
  size = data.image_size and tuple(data.image_size)
  if size is None:
    size = _common_size([path for rows in listed.values() for _, path in rows])
  ids = {name: k for k, name in enumerate(classes)} | {"": -1}
  splits = {
    role: Split(
      Files(tuple(path for _, path in rows), size, 3),
      np.array([ids[name] for name, _ in rows], np.int32),
    )
    for role, rows in listed.items()
  }
  if _fits(splits):
    fingerprint = _content_fingerprint(splits, classes)
  else:
    digest = hashlib.sha256()
    for path in sorted(path for rows in listed.values() for _, path in rows):
      name = os.fsencode(os.path.relpath(path, root))
      digest.update(name + f"\0{os.lstat(path).st_size}\0".encode())
    fingerprint = digest.hexdigest()
  splits, skipped = _decoded(data, splits)
  for k, name in enumerate(classes):
    if not (splits["train"].labels == k).any():
      raise ConfigError(f"{root}/train/{name}: none of its pictures can be read")
  return Dataset(
    name=data.name,
    train=splits["train"],
    val=splits.get("val"),
    test=splits["test"],
    classes=classes,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    fingerprint=fingerprint,
    skipped=skipped,
    note=_joined(*(found.summary(role) for role, found in tree.items())),
  )


@dataclasses.dataclass(frozen=True)
class Found:
  """What one split's folder holds.

  Attributes:
    path: the folder.
    pictures: class -> sorted paths; "" for pictures that lie in no class folder.
    ignored: files of other kinds.
  """

  path: Path
  pictures: dict[str, list[str]]
  ignored: list[str]

  def summary(self, role: str) -> str:
    counts = {name or "(no class)": len(paths) for name, paths in self.pictures.items()}
    if len(counts) <= 20:
      text = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    else:
      least, most = min(counts.values()), max(counts.values())
      text = f"{len(counts)} classes of {least} to {most}"
    text = f"{role} ({self.path.name}/): {text}"
    if self.ignored:
      names = ", ".join(self.ignored[:3]) + (", ..." if len(self.ignored) > 3 else "")
      text += f"; {len(self.ignored)} files ignored ({names})"
    return text


def folder_tree(root: str | os.PathLike) -> dict[str, Found]:
  """Lists a folder data set; decodes nothing.

  Returns:
    "train", "test" and, where there is one, "val".

  Raises:
    ConfigError: it is not laid out as `_folder` says; the message shows what is there.
  """
  root = Path(root)
  if not root.is_dir():
    raise ConfigError(f"data.dir={str(root)!r} is not a folder")
  inside = sorted(p.name for p in root.iterdir() if p.is_dir())
  layout = "expected train/CLASS/*.jpg and test/CLASS/*.jpg (or val/, validation/)"
  if "train" not in inside:
    raise ConfigError(f"data.dir={str(root)!r} has no train/: {layout}; {_hint(root)}")
  validation = [name for name in ("val", "validation") if name in inside]
  if len(validation) > 1:
    raise ConfigError(f"{root} has both val/ and validation/: keep one of them")
  if "test" in inside:
    roles = {"train": "train", "test": "test"}
    if validation:
      roles["val"] = validation[0]
  elif validation:
    roles = {"train": "train", "test": validation[0]}
  else:
    raise ConfigError(
      f"data.dir={str(root)!r} has only {_listed(inside)}: {layout}; {_hint(root)}"
    )
  tree = {role: _found(root / name) for role, name in roles.items()}
  train = tree["train"]
  classes = sorted(name for name in train.pictures if name)
  if len(classes) < 2:
    loose = len(train.pictures[""]) if "" in train.pictures else 0
    raise ConfigError(
      f"{train.path} has {len(classes)} class folders ({_listed(classes)}) and {loose} "
      f"pictures outside them; expected two classes or more: {layout}"
    )
  if "" in train.pictures:
    raise ConfigError(
      f"{train.path} has pictures in no class folder, such as {train.pictures[''][0]}; "
      "training needs a label for each"
    )
  for name in classes:
    if not train.pictures[name]:
      raise ConfigError(
        f"{train.path}/{name} has no pictures ({', '.join(pictures.EXTENSIONS)}); "
        "remove the folder or fill it"
      )
  for role, found in tree.items():
    extra = sorted(set(found.pictures) - set(classes) - {""})
    if extra:
      raise ConfigError(
        f"{found.path} has classes that train/ lacks: {_listed(extra)}; train/ has "
        f"{_listed(classes)}"
      )
    if not any(found.pictures.values()):
      raise ConfigError(f"{role} folder {found.path} has no pictures")
  return tree


def check_folder(root: str | os.PathLike) -> list[tuple[str, str]]:
  """Decodes every picture of a folder data set.

  Returns:
    (path, reason) of each that training would refuse.
  """
  paths = [
    path
    for found in folder_tree(root).values()
    for paths in found.pictures.values()
    for path in paths
  ]
  return pictures.failures(paths)


def _found(folder):
  """Walks one split; hidden files and folders do not count."""
  found, ignored = {}, []

  def sort_in(label, path):
    if Path(path).suffix.lower() in pictures.EXTENSIONS:
      found.setdefault(label, []).append(str(path))
    else:
      ignored.append(os.path.relpath(path, folder))

  for entry in folder.iterdir():
    if entry.name.startswith("."):
      continue
    if not entry.is_dir():
      sort_in("", entry)
      continue
    found[entry.name] = []
    for place, folders, files in os.walk(entry):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in files:
        if not name.startswith("."):
          sort_in(entry.name, os.path.join(place, name))
  # The order of a directory differs between machines.
  found = {label: sorted(paths) for label, paths in found.items()}
  return Found(folder, found, sorted(ignored))


def _hint(root):
  """What the user may have meant."""
  inside = sorted(p for p in root.iterdir() if p.is_dir())
  below = [p for p in inside if (p / "train").is_dir()]
  if below:
    return f"try data.dir={str(below[0])!r}"
  loose = sum(p.suffix.lower() in pictures.EXTENSIONS for p in root.iterdir())
  if loose:
    return f"found {loose} pictures with no class folder"
  if root.name == "train":
    return f"try data.dir={str(root.parent)!r}"
  return f"found folders: {_listed([p.name for p in inside])}"


def _listed(names):
  names = list(names)
  more = f" and {len(names) - 10} more" if len(names) > 10 else ""
  return (", ".join(names[:10]) + more) or "none"


def _common_size(paths):
  """Returns the (height, width) that all readable pictures share."""

  def size_of(path):
    try:
      return pictures.shape(path)
    except (pictures.ImageError, OSError):
      return None  # `_decoded` counts or refuses it

  sizes = dict(zip(paths, pictures.in_threads(size_of, paths)))
  distinct = {size: path for path, size in sizes.items() if size is not None}
  if len(distinct) == 1:
    return next(iter(distinct))
  if not distinct:
    raise ConfigError(f"none of {len(paths)} pictures can be read, such as {paths[0]}")
  (first, one), (second, other) = list(distinct.items())[:2]
  raise ConfigError(
    f"pictures differ in size ({one} is {first[0]}x{first[1]}, {other} {second[0]}x"
    f"{second[1]}): set data.image_size"
  )


# --- TFDS -----------------------------------------------------------------------------


def _tfds(data, seed):
  """A TFDS set prepared as array_record, read without TensorFlow.

  Splits: train; test, or validation where test is missing or wholly unlabelled (as in
  imagenet2012); otherwise validation is the validation split.
  """
  del seed
  import tensorflow_datasets as tfds  # 1 s, and only this source needs it

  name = data.name.removeprefix("tfds:")
  builder = _tfds_builder(tfds, name, data)
  features = builder.info.features
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
        f"which has no random access; {_prepare(data, name)}"
      ) from None
  described = _tfds_description(builder, sorted(sources))
  labels = _tfds_labels(sources, described)
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
        1 if channels == 1 else 3,
      ),
      labels[split],
    )
    for role, split in roles.items()
    if split in sources
  }
  classes = tuple(features["label"].names)
  if _fits(splits):
    fingerprint = _content_fingerprint(splits, classes)
  else:
    fingerprint = hashlib.sha256(described.encode()).hexdigest()
  splits, skipped = _decoded(data, splits)
  known = builder.name if builder.name in MOMENTS else None
  half = (0.5,) * splits["train"].images.shape[3]
  mean, std = MOMENTS[known] if known else (half, half)
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


def _tfds_builder(tfds, name, data):
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
      f"data.name={data.name!r} is not prepared in {builder.data_dir}; "
      f"{_prepare(data, name)}"
    )
  return builder


def _prepare(data, name):
  where = f" --data_dir={data.dir}" if data.dir else ""
  return f"try `python scripts/prepare_data.py --dataset={name}{where}`"


def _tfds_description(builder, splits):
  """What tells one prepared set from another without reading it: text."""
  lines = [builder.info.full_name]
  for split in splits:
    info = builder.info.splits[split]
    lines.append(f"{split} {list(info.shard_lengths)} {int(info.num_bytes)}")
  return "\n".join(lines)


def _tfds_labels(sources, described):
  """Returns split -> int32 [n].

  Labels lie among the images, so getting them reads the whole set: for a large one they
  are kept in a file, named after the description of the set.
  """
  key = hashlib.sha256(described.encode()).hexdigest()[:16]
  cache = Path("~/.cache/vit_jax").expanduser() / f"labels-{key}.npz"
  large = sum(map(len, sources.values())) > LABELS_KEPT_FROM
  if large and cache.is_file():
    with np.load(cache) as kept:
      return {split: kept[split] for split in sources}
  labels = {}
  for split, source in sources.items():
    values = np.empty(len(source), np.int32)
    for start in range(
      0, len(source), 256
    ):  # in blocks: array_record reads in parallel
      rows = list(range(start, min(start + 256, len(source))))
      values[rows] = [record["label"] for record in source.__getitems__(rows)]
    labels[split] = values
  if large:
    cache.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **labels)
    # Written whole or not at all: other processes may be at the same place.
    partial = cache.with_suffix(f".{os.getpid()}")
    partial.write_bytes(buffer.getvalue())
    partial.replace(cache)
  return labels


# --------------------------------------------------------------------------------------

SOURCES = {
  "digits": _digits,
  "digits:half": _digits_half,
  "mnist": _mnist,
  "fashion_mnist": _fashion_mnist,
  "cifar10": _cifar,
  "cifar100": _cifar,
  "folder": _folder,
  "tfds:NAME": _tfds,
  "synthetic": _synthetic,
}

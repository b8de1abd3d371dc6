"""Sets that are arrays from the start: digits, MNIST and its like, made-up gratings."""

import dataclasses
import gzip
import hashlib
import math
import os
import zlib
from pathlib import Path

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data.split import Dataset, Split, generator

# Largest array an idx file may declare; the largest of the family, EMNIST, has 638 MB.
IDX_LIMIT = 1 << 30
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


def _fingerprint(*arrays) -> str:
  """sha256 of shapes and bytes of arrays, in order."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def in_memory(
  name: str, train: Split, test: Split, classes, moments, note: str | None = None
) -> Dataset:
  """Makes a data set of arrays; `moments` is (mean, std) of each channel."""
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


def _all_digits():
  """The 1797 scanned digits of scikit-learn: uint8 [n, 8, 8, 1], int32 [n]."""
  from sklearn.datasets import load_digits  # 0.5 s, and only this source needs it

  digits = load_digits()
  grey = np.rint(digits.images * 255 / 16).astype(np.uint8)
  return grey[..., None], digits.target.astype(np.int32)


def digits(data: config.Data, seed: int) -> Dataset:
  """1437 / 360, the same share of every class, the rows of scikit-learn's own split."""
  from sklearn.model_selection import train_test_split

  grey, labels = _all_digits()
  # scikit-learn takes 32 bits of seed.
  train, test = train_test_split(
    np.arange(len(labels)), test_size=360, stratify=labels, random_state=seed % 2**32
  )
  return _digits_split(data, grey, labels, train, test, None)


def digits_half(data: config.Data, seed: int) -> Dataset:
  """First half / second half: the split of scikit-learn's documented example."""
  del seed
  grey, labels = _all_digits()
  rows = np.arange(len(labels))
  note = "the halves were written by different people: expect 2-3 points less"
  return _digits_split(data, grey, labels, rows[:898], rows[898:], note)


def _digits_split(data, grey, labels, train, test, note):
  found = in_memory(
    data.name,
    Split(grey[train], labels[train]),
    Split(grey[test], labels[test]),
    DIGITS,
    MOMENTS["digits"],
    note,
  )
  # Of the source, so that every seed's split has the same one.
  return dataclasses.replace(found, fingerprint=_fingerprint(grey, labels))


def synthetic(data: config.Data, seed: int) -> Dataset:
  """Ten classes of coloured gratings under noise: 320 training and 160 test images.

  A class is an angle of the stripes and a tint; where the stripes start is random. The
  same images whatever the seed, drawn at `data.image_size` (32x32 when None).
  """
  del seed
  height, width = (32, 32) if data.image_size is None else tuple(data.image_size)
  train = _gratings(320, height, width, "synthetic train")
  test = _gratings(160, height, width, "synthetic test")
  return in_memory("synthetic", train, test, DIGITS, ((0.5,) * 3, (0.5,) * 3))


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


def mnist(data: config.Data, seed: int) -> Dataset:
  del seed
  hint = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
    "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz there, or set data.dir"
  )
  return _idx_set(data, DIGITS, hint)


def fashion_mnist(data: config.Data, seed: int) -> Dataset:
  del seed
  hint = "try `apt-get install dataset-fashion-mnist`, or set data.dir"
  return _idx_set(data, CLOTHES, hint)


def _idx_set(data, classes, hint):
  folder = _find_folder(data, "train-images-idx3-ubyte", hint)
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
  return in_memory(
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


def _find_folder(data, stem, hint):
  """Returns `data.dir`, or the first usual folder that holds the file."""
  if data.dir is not None:
    folder = Path(data.dir).expanduser()
    if not folder.is_dir():
      raise ConfigError(f"data.dir={data.dir!r} is not a folder")
    return folder
  folders = usual_folders(data.name)
  for folder in folders:
    if any((folder / name).exists() for name in _idx_names(stem)):
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

"""CIFAR-10 and CIFAR-100 from their binary releases; pickles are never read."""

import dataclasses
import tarfile
import zlib
from pathlib import Path

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import arrays
from vit_jax.data.split import Dataset, Split


@dataclasses.dataclass(frozen=True)
class _Release:
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


_RELEASES = {
  "cifar10": _Release(
    stem="cifar-10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
    test="test_batch.bin",
    names="batches.meta.txt",
    label_bytes=1,
    classes=10,
  ),
  "cifar100": _Release(
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
LARGEST = 160_000_000


def load(data: config.Data, seed: int) -> Dataset:
  """Reads the archive, or the folder it unpacks to."""
  del seed
  spec = _RELEASES[data.name]
  place, content = _content(data, spec)
  classes = tuple(content[spec.names].decode("ascii", "replace").split())
  if len(classes) != spec.classes:
    raise ConfigError(
      f"{place}: {spec.names} has {len(classes)} names, expected {spec.classes}"
    )
  parts = [_records(place, spec, name, content) for name in spec.train]
  train = Split(*(np.concatenate(values) for values in zip(*parts)))
  test = Split(*_records(place, spec, spec.test, content))
  note = None
  if (len(train), len(test)) != (50_000, 10_000):
    note = f"{len(train)} + {len(test)} images; the official set has 50000 + 10000"
  return arrays.in_memory(
    data.name, train, test, classes, arrays.MOMENTS[data.name], note
  )


def _records(place, spec, name, content):
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


def _content(data, spec):
  """Returns (archive or folder, {file name: bytes}) of the files of the release."""
  archive = f"{spec.stem}-binary.tar.gz"
  wanted = (*spec.train, spec.test, spec.names)
  if data.dir is None:
    places = arrays.usual_folders(data.name)
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
  if size > LARGEST:
    raise ConfigError(f"{name} has {size} bytes; no file of CIFAR is that large")

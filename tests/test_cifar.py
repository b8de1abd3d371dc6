"""CIFAR from files generated here in the format of the original."""

import io
import tarfile

import numpy as np
import pytest
from sources import load, noise, refused

from vit_jax.data import cifar


def cifar_files(name, classes=None):
  """Generated files in the official binary layout; returns (files, images, labels)."""
  if name == "cifar10":
    folder, names, tests = "cifar-10-batches-bin", "batches.meta.txt", "test_batch.bin"
    trains = [f"data_batch_{k}.bin" for k in range(1, 6)]
    classes = classes or [f"kind{k}" for k in range(10)]
  else:
    folder, names, tests = "cifar-100-binary", "fine_label_names.txt", "test.bin"
    trains, classes = ["train.bin"], classes or [f"kind{k}" for k in range(100)]
  files, pixels, labels = {}, {}, {}
  for k, file in enumerate([*trains, tests]):
    pixels[file] = noise(4, 32, 32, 3, seed=k)
    labels[file] = np.random.default_rng(k).integers(0, len(classes), 4)
    records = b""
    for image, label in zip(pixels[file], labels[file]):
      coarse = [] if name == "cifar10" else [7]
      records += bytes([*coarse, label]) + image.transpose(2, 0, 1).tobytes()
    files[f"{folder}/{file}"] = records
  files[f"{folder}/{names}"] = ("\n".join(classes) + "\n\n").encode()
  together = [np.concatenate([d[f] for f in trains]) for d in (pixels, labels)]
  return files, together, (pixels[tests], labels[tests])


def write_tar(path, files):
  with tarfile.open(path, "w:gz") as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))


ARCHIVES = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("place", ["archive", "its folder", "extracted", "above"])
def test_cifar(tmp_path, name, place):
  files, train, test = cifar_files(name)
  path = tmp_path / ARCHIVES[name]
  write_tar(path, files)
  if place in ("extracted", "above"):
    for file, content in files.items():
      (tmp_path / file).parent.mkdir(exist_ok=True)
      (tmp_path / file).write_bytes(content)
    path.unlink()
  where = {
    "archive": path,
    "its folder": tmp_path,
    "extracted": (tmp_path / next(iter(files))).parent,
    "above": tmp_path,
  }[place]
  before = sorted(tmp_path.rglob("*"))
  found = load(name, dir=str(where))
  for split, (pixels, labels) in ((found.train, train), (found.test, test)):
    np.testing.assert_array_equal(split.images, pixels)
    np.testing.assert_array_equal(split.labels, labels)
  assert found.classes[3] == "kind3" and len(found.mean) == 3
  assert "official set has 50000" in found.note
  assert sorted(tmp_path.rglob("*")) == before  # nothing was extracted


def test_cifar_refusals(tmp_path):
  files, _, _ = cifar_files("cifar10")
  path = tmp_path / ARCHIVES["cifar10"]
  refused("cifar10", ARCHIVES["cifar10"], "kriz", dir=str(tmp_path))
  (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
  refused("cifar10", "Python version", "pickles", dir=str(tmp_path))
  write_tar(path, {"cifar-10-batches-py/data_batch_1": b"pickle"})
  refused("cifar10", "Python version", "pickles", dir=str(path))
  batch = "cifar-10-batches-bin/data_batch_2.bin"
  write_tar(path, files | {batch: files[batch][:-1]})
  refused("cifar10", "data_batch_2.bin", "not whole records", dir=str(path))
  write_tar(path, {k: v for k, v in files.items() if k != batch})
  refused("cifar10", "has no", "data_batch_2.bin", dir=str(path))
  write_tar(path, cifar_files("cifar10", classes=["a", "b"])[0])
  refused("cifar10", "has 2 names, expected 10", dir=str(path))
  write_tar(path, files)
  path.write_bytes(path.read_bytes()[:20_000])
  refused("cifar10", str(path), "damaged archive", dir=str(path))
  path.write_bytes(b"not an archive")
  refused("cifar10", str(path), "damaged archive", dir=str(path))


def test_cifar_member_of_absurd_size(tmp_path, monkeypatch):
  monkeypatch.setattr(cifar, "LARGEST", 100)
  path = tmp_path / ARCHIVES["cifar100"]
  write_tar(path, cifar_files("cifar100")[0])
  refused("cifar100", "no file of CIFAR is that large", dir=str(path))

"""Digits, idx files (generated in the format of the original) and gratings."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sources import equal, load, noise, refused

from vit_jax.config import Pair
from vit_jax.data import arrays

# --- digits ---------------------------------------------------------------------------


def test_digits_are_the_rows_of_scikit_learn():
  digits = load_digits()
  for seed, state in ((0, 0), (5, 5), (2**40 + 7, 7)):
    x, tx, y, ty = train_test_split(
      digits.images, digits.target, test_size=360, stratify=digits.target,
      random_state=state,
    )  # fmt: skip
    found = load("digits", seed=seed)
    assert found.train.images.shape == (1437, 8, 8, 1)
    assert found.train.images.dtype == np.uint8 and found.train.labels.dtype == np.int32
    np.testing.assert_array_equal(found.train.labels, y)
    np.testing.assert_array_equal(found.test.labels, ty)
    for ours, theirs in ((found.train.images, x), (found.test.images, tx)):
      np.testing.assert_allclose(ours[..., 0] / 255, theirs / 16, atol=0.5 / 255 + 1e-9)
  assert found.classes == tuple("0123456789")


def test_digits_half_is_the_documented_example():
  digits = load_digits()
  _, _, y, ty = train_test_split(
    digits.images, digits.target, test_size=0.5, shuffle=False
  )
  found = load("digits:half")
  np.testing.assert_array_equal(found.train.labels, y)
  np.testing.assert_array_equal(found.test.labels, ty)
  assert (len(found.train), len(found.test)) == (898, 899)


def test_digits_moments():
  pixels = np.rint(load_digits().images * 255 / 16) / 255
  found = load("digits")
  assert found.mean == (round(pixels.mean(), 4),)
  assert found.std == (round(pixels.std(), 4),)


def test_fingerprint_changes_with_any_label_or_pixel(monkeypatch):
  grey, labels = arrays._all_digits()
  first = load("digits").fingerprint
  assert len(first) == 64 and first == load("digits", seed=1).fingerprint
  for change in ("pixel", "label"):
    new_grey, new_labels = grey.copy(), labels.copy()
    if change == "pixel":
      new_grey[1000, 3, 3] ^= 1
    else:
      new_labels[1000] = (new_labels[1000] + 1) % 10
    monkeypatch.setattr(
      arrays, "_all_digits", lambda values=(new_grey, new_labels): values
    )
    assert load("digits").fingerprint != first


# --- idx ------------------------------------------------------------------------------


def idx(array):
  head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
  return head + array.astype(np.uint8).tobytes()


def write_mnist(folder, pack=gzip.compress, dot="-"):
  """Six training and four test images; returns the arrays."""
  folder.mkdir(parents=True, exist_ok=True)
  arrays = {}
  for k, (part, n) in enumerate({"train": 6, "t10k": 4}.items()):
    grey, labels = noise(n, 28, 28, seed=k), np.arange(n)
    end = ".gz" if pack is gzip.compress else ""
    (folder / f"{part}-images{dot}idx3-ubyte{end}").write_bytes(pack(idx(grey)))
    (folder / f"{part}-labels{dot}idx1-ubyte{end}").write_bytes(pack(idx(labels)))
    arrays[part] = grey, labels
  return arrays


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
@pytest.mark.parametrize("dot", ["-", "."])
def test_idx_plain_or_gz(tmp_path, pack, dot):
  arrays = write_mnist(tmp_path, pack, dot)
  found = load("mnist", dir=str(tmp_path))
  for split, part in ((found.train, "train"), (found.test, "t10k")):
    np.testing.assert_array_equal(split.images[..., 0], arrays[part][0])
    np.testing.assert_array_equal(split.labels, arrays[part][1])
    assert split.images.dtype == np.uint8 and split.labels.dtype == np.int32
  assert (found.mean, found.std) == ((0.1307,), (0.3081,))


def test_usual_folders(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setenv("VIT_JAX_DATA", str(tmp_path / "sets"))
  text = refused("mnist", "train-images-idx3-ubyte", "data.dir")
  places = [tmp_path / "sets" / "mnist", tmp_path / ".cache/vit_jax/mnist"]
  places += [tmp_path / "data" / "mnist"]
  for place in places:
    assert str(place.relative_to(tmp_path)) in text
    write_mnist(place)
    assert len(load("mnist").train) == 6
    for file in place.iterdir():
      file.unlink()
  if not Path("/usr/share/datasets/fashion-mnist").exists():
    refused("fashion_mnist", "apt-get install dataset-fashion-mnist")
  refused("mnist", "nowhere", "not a folder", dir="nowhere")


IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
  ("name", "change", "word"),
  [
    (IMAGES, lambda b: b[:-1], "only 4703 of the 4704 bytes"),
    (IMAGES, lambda b: b + b"\0", "more than the 4704 bytes"),
    (IMAGES, lambda b: b[:9], "ends within its header"),
    (IMAGES, lambda _: b"", "starts with nothing"),
    (IMAGES, lambda b: b"\0\0\x0d\x03" + b[4:], "expected 00 00 08 03"),
    (LABELS, lambda b: b"\0\0\x08\x03" + b[4:], "expected 00 00 08 01"),
    (IMAGES, lambda b: b[:4] + b"\xff" * 12 + b[16:], "more than it can hold"),
    (LABELS, lambda _: idx(np.arange(5)), "6 images but"),
    (LABELS, lambda _: idx(np.full(6, 10)), "expected 0 to 9"),
    (LABELS, lambda _: idx(np.full(6, 255)), "expected 0 to 9"),
  ],
)
@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_damaged_idx(tmp_path, name, change, word, pack):
  write_mnist(tmp_path, bytes)
  path = tmp_path / name
  path.write_bytes(pack(change(path.read_bytes())))
  text = refused("mnist", word, dir=str(tmp_path))
  assert str(path) in text or "labels of train" in text


def test_damaged_gzip_and_missing_file(tmp_path):
  write_mnist(tmp_path)
  path = tmp_path / f"{IMAGES}.gz"
  whole = path.read_bytes()
  path.write_bytes(whole[: len(whole) // 2])
  refused("mnist", str(path), "damaged", dir=str(tmp_path))
  path.write_bytes(whole[:100] + b"\xff\xff" + whole[102:])
  refused("mnist", str(path), dir=str(tmp_path))
  path.unlink()
  refused("mnist", str(tmp_path), IMAGES, dir=str(tmp_path))


def test_gzip_bomb_takes_no_memory(tmp_path, monkeypatch):
  write_mnist(tmp_path)
  path = tmp_path / f"{IMAGES}.gz"
  header = bytes([0, 0, 8, 3]) + struct.pack(">III", 9, 1 << 14, 1 << 14)
  path.write_bytes(gzip.compress(header))
  refused("mnist", "more than it can hold", dir=str(tmp_path))
  # A file that holds what it declares is bounded as well.
  monkeypatch.setattr(arrays, "IDX_LIMIT", 1000)
  path.write_bytes(gzip.compress(idx(np.zeros((6, 28, 28)))))
  refused("mnist", "more than it can hold", dir=str(tmp_path))


def test_debian_fashion_mnist():
  folder = Path("/usr/share/datasets/fashion-mnist")
  if not folder.is_dir():
    pytest.skip("the Debian package dataset-fashion-mnist is not installed")
  found = load("fashion_mnist", dir=str(folder), val=0.1)
  assert (len(found.train), len(found.val), len(found.test)) == (54000, 6000, 10000)
  assert np.bincount(found.val.labels).tolist() == [600] * 10
  assert found.classes[9] == "Ankle boot" and found.train.images.shape[1:] == (
    28,
    28,
    1,
  )
  pixels = found.train.images[::6].astype(np.float32) / 255
  np.testing.assert_allclose(pixels.mean(), found.mean[0], atol=3e-3)
  np.testing.assert_allclose(pixels.std(), found.std[0], atol=3e-3)


# --- synthetic ------------------------------------------------------------------------


def test_synthetic_is_fixed_and_can_be_learned():
  found = load("synthetic", seed=0)
  equal(found.train, load("synthetic", seed=2**40).train)
  assert found.train.images.shape == (320, 32, 32, 3) and len(found.classes) == 10
  assert load("synthetic", image_size=Pair(8, 12)).test.images.shape == (160, 8, 12, 3)
  train, test = (s.images.mean((1, 2)) for s in (found.train, found.test))
  centres = np.stack([train[found.train.labels == k].mean(0) for k in range(10)])
  distance = np.linalg.norm(test[:, None] - centres[None], axis=-1)
  assert (distance.argmin(1) == found.test.labels).mean() > 0.8
  assert not np.array_equal(found.train.images[:160], found.test.images)

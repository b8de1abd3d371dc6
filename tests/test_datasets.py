"""Image sets: every file is generated here in the format of the original."""

import ast
import dataclasses
import gzip
import importlib.util
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from vit_jax import config
from vit_jax.config import ConfigError, Pair
from vit_jax.data import datasets, images

ROOT = Path(__file__).parents[1]


def load(name, seed=0, **settings):
  return datasets.load(config.Data(name=name, **settings), seed)


def refused(name, *words, **settings):
  """Loads, expects a refusal in one line that holds all words; returns the text."""
  with pytest.raises(ConfigError) as caught:
    load(name, **settings)
  text = str(caught.value)
  assert "\n" not in text
  for word in words:
    assert word in text, text
  return text


def noise(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def equal(one, other):
  np.testing.assert_array_equal(one.images, other.images)
  np.testing.assert_array_equal(one.labels, other.labels)


# --- all sources ----------------------------------------------------------------------


def test_unknown_name_gets_the_nearest():
  refused("fasion_mnist", "did you mean 'fashion_mnist'")
  refused("imagenet", "known:", "tfds:NAME")
  refused("tfds", "is no data set")


def test_imports_neither_jax_nor_tensorflow():
  for file in ("datasets.py", "images.py"):
    tree = ast.parse((ROOT / "vit_jax" / "data" / file).read_text())
    names = [
      a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    ]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not {"jax", "tensorflow"} & {name.split(".")[0] for name in names}


def made_up(labels, test_labels=(0, 1)):
  """A source of constant images with given labels of two classes."""

  def split(labels):
    labels = np.array(labels, np.int32)
    return datasets.Split(np.zeros((len(labels), 2, 2, 1), np.uint8), labels)

  def source(data, seed):
    del seed
    return datasets.Dataset(
      name=data.name,
      train=split(labels),
      val=None,
      test=split(test_labels),
      classes=("a", "b"),
      mean=(0.5,),
      std=(0.5,),
      fingerprint="",
    )

  return source


@pytest.mark.parametrize(
  ("labels", "words"),
  [
    ([-1, -1], ["2 of 2 training images are unlabelled"]),
    ([0, 1, -1], ["1 of 3 training images are unlabelled"]),
    ([0, 2], ["from 0 to 2", "expected 0 to 1"]),
    ([0, -2], ["from -2 to 0"]),
    ([], ["the train split has no images"]),
  ],
)
def test_labels_that_cannot_be_learned(monkeypatch, labels, words):
  monkeypatch.setitem(datasets.SOURCES, "made up", made_up(labels))
  refused("made up", *words)


def test_unlabelled_test_rows_are_kept(monkeypatch):
  monkeypatch.setitem(datasets.SOURCES, "made up", made_up([0, 1], [0, -1, 1]))
  assert load("made up").test.labels.tolist() == [0, -1, 1]


def test_cut_is_a_partition_with_equal_shares():
  labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [50, 30, 20]))
  kept, taken = datasets.cut(labels, 0.1, seed=0)
  assert sorted([*kept, *taken]) == list(range(100))
  assert np.bincount(labels[taken]).tolist() == [5, 3, 2]
  assert (np.diff(taken) > 0).all() and (np.diff(kept) > 0).all()


@pytest.mark.parametrize("amount", [1, 7, 0.31, 99, 0.999])
def test_cut_by_share_and_by_number(amount):
  labels = np.random.default_rng(1).integers(0, 7, 1000)
  kept, taken = datasets.cut(labels, amount, seed=3)
  number = amount if amount >= 1 else round(1000 * amount)
  assert len(taken) == number and len(kept) == 1000 - number
  share = np.bincount(labels[taken], minlength=7) / np.bincount(labels)
  assert (
    np.abs(share * np.bincount(labels) - number * np.bincount(labels) / 1000).max() < 1
  )


def test_cut_depends_on_every_bit_of_the_seed():
  labels = np.zeros(100, int)
  seeds = [0, 1, 2**31, 2**32, 2**40, 2**64, 2**128]
  drawn = {tuple(datasets.cut(labels, 10, seed)[1]) for seed in seeds}
  assert len(drawn) == len(seeds)
  np.testing.assert_array_equal(
    datasets.cut(labels, 10, 2**40)[1], datasets.cut(labels, 10, 2**40)[1]
  )


@pytest.mark.parametrize("amount", [0.001, 0.999, 100, 1000, 2.5])
def test_cut_refuses_what_leaves_nothing(amount):
  with pytest.raises(ConfigError, match="data.val"):
    datasets.cut(np.zeros(100, int), amount, 0)


def test_validation_comes_out_of_train():
  whole, parted = load("synthetic"), load("synthetic", val=0.25)
  assert (len(parted.train), len(parted.val)) == (240, 80)
  assert np.bincount(parted.val.labels).tolist() == [8] * 10
  both = np.concatenate([parted.train.images, parted.val.images])
  assert sorted(i.tobytes() for i in both) == sorted(
    i.tobytes() for i in whole.train.images
  )
  equal(whole.test, parted.test)
  assert whole.val is None and whole.fingerprint == parted.fingerprint


def test_resizing():
  small, large = load("digits"), load("digits", image_size=Pair(6, 12), val=0.1)
  assert large.train.images.shape[1:] == (6, 12, 1) == large.val.images.shape[1:]
  expected = images.resize(small.test.images[3], (6, 12))
  np.testing.assert_array_equal(large.test.images[3], expected)
  assert large.fingerprint == small.fingerprint
  refused("digits", "data.image_size=(0, 4)", image_size=Pair(0, 4))


def test_resizing_to_more_than_memory_is_lazy(monkeypatch):
  array = load("digits", image_size=Pair(5, 7), val=20)
  monkeypatch.setattr(datasets, "MEMORY", 1000)
  lazy = load("digits", image_size=Pair(5, 7), val=20)
  for name in ("train", "val", "test"):
    one, other = getattr(array, name), getattr(lazy, name)
    assert not isinstance(other.images, np.ndarray)
    assert other.images.shape == one.images.shape and len(other) == len(other.images)
    np.testing.assert_array_equal(other.labels, one.labels)
    np.testing.assert_array_equal(np.stack(list(other.images)), one.images)
  assert isinstance(load("digits").train.images, np.ndarray)


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
  grey, labels = datasets._all_digits()
  first = load("digits").fingerprint
  assert len(first) == 64 and first == load("digits", seed=1).fingerprint
  for change in ("pixel", "label"):
    new_grey, new_labels = grey.copy(), labels.copy()
    if change == "pixel":
      new_grey[1000, 3, 3] ^= 1
    else:
      new_labels[1000] = (new_labels[1000] + 1) % 10
    monkeypatch.setattr(
      datasets, "_all_digits", lambda values=(new_grey, new_labels): values
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
  monkeypatch.setattr(datasets, "IDX_LIMIT", 1000)
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


# --- CIFAR ----------------------------------------------------------------------------


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
  monkeypatch.setattr(datasets, "CIFAR_LIMIT", 100)
  path = tmp_path / ARCHIVES["cifar100"]
  write_tar(path, cifar_files("cifar100")[0])
  refused("cifar100", "no file of CIFAR is that large", dir=str(path))


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


# --- folder ---------------------------------------------------------------------------


def write_folder(root, tree, size=(6, 5)):
  """Writes one distinct PNG (whatever the name) for each path of `tree`."""
  for k, name in enumerate(tree):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*size, 3, seed=k)).save(path, "PNG")


PETS = [
  "train/cat/b.PNG",
  "train/cat/a.jpg",
  "train/dog/x.jpeg",
  "train/emu/y.WebP",
  "train/emu/z.bmp",
  "test/emu/1.png",
  "test/cat/2.png",
]


def test_folder(tmp_path):
  write_folder(tmp_path, PETS)
  (tmp_path / "train/dog/notes.txt").write_text("x")
  (tmp_path / "train/dog/.hidden.png").write_text("x")
  found = load("folder", dir=str(tmp_path))
  assert found.classes == ("cat", "dog", "emu")
  assert found.train.labels.tolist() == [0, 0, 1, 2, 2]
  assert found.test.labels.tolist() == [0, 2]  # ids come from train; dog is missing
  for row, name in ((0, "train/cat/a.jpg"), (1, "train/cat/b.PNG")):
    expected = np.asarray(Image.open(tmp_path / name))
    np.testing.assert_array_equal(found.train.images[row], expected)
  assert found.train.images.shape == (5, 6, 5, 3)
  assert "cat 2, dog 1, emu 2" in found.note
  assert "1 files ignored (dog/notes.txt)" in found.note and "hidden" not in found.note
  assert found.skipped == 0 and found.val is None


def test_folder_ids_do_not_depend_on_creation_order(tmp_path):
  sets = []
  for k, tree in enumerate((PETS, PETS[::-1])):
    write_folder(tmp_path / str(k), sorted(tree))
    for name in tree:  # rewritten in another order, with the same pictures
      path = tmp_path / str(k) / name
      content = path.read_bytes()
      path.unlink()
      path.write_bytes(content)
    sets.append(load("folder", dir=str(tmp_path / str(k))))
  equal(sets[0].train, sets[1].train)
  assert sets[0].classes == sets[1].classes
  assert sets[0].fingerprint == sets[1].fingerprint


def test_folder_validation_split(tmp_path):
  write_folder(tmp_path, [*PETS, "val/cat/1.png", "val/dog/1.png", "val/dog/2.png"])
  found = load("folder", dir=str(tmp_path), val=0.4)
  assert found.val.labels.tolist() == [0, 1, 1] and len(found.train) == 5
  assert "data.val cuts no more" in found.note
  (tmp_path / "val").rename(tmp_path / "validation")
  os.rename(tmp_path / "test", tmp_path / "elsewhere")
  found = load("folder", dir=str(tmp_path))
  assert found.val is None and found.test.labels.tolist() == [0, 1, 1]
  (tmp_path / "val").mkdir()
  refused("folder", "both val/ and validation/", dir=str(tmp_path))


def test_folder_unlabelled_test_pictures(tmp_path):
  write_folder(tmp_path, [*PETS, "test/u.png", "test/v.png"])
  assert load("folder", dir=str(tmp_path)).test.labels.tolist() == [-1, -1, 0, 2]


@pytest.mark.parametrize(
  ("tree", "below", "words"),
  [
    (["a.jpg", "b.jpg", "c.jpg", "d.png"], "", ["no train/", "4 pictures"]),
    (["pets/train/a/1.png", "pets/train/b/1.png"], "", ["pets'", "try data.dir="]),
    (["train/a/1.png", "train/b/1.png"], "", ["only train:", "test/"]),
    (["train/a/1.png", "train/b/1.png", "test/a/1.png"], "train", ["try data.dir="]),
    (["a/1.png", "b/1.png"], "", ["no train/", "found folders: a, b"]),
    (["train/a/1.png", "test/a/1.png"], "", ["1 class folders (a)"]),
    (["train/1.png", "train/2.png", "test/3.png"], "", ["0 class", "2 pictures"]),
    (["train/a/1.png", "train/b/1.png", "test/d/1.png"], "", ["lacks: d", "has a, b"]),
    (["train/a/1.png", "train/b/1.gif", "test/a/1.png"], "", ["train/b has no"]),
    (["train/a/1.png", "train/b/1.png", "test/a/1.gif"], "", ["test has no pictures"]),
    (["train/a/1.png", "train/b/1.png", "train/c.png", "test/a/1.png"], "", ["c.png"]),
  ],
)
def test_folder_layouts_that_are_refused(tmp_path, tree, below, words):
  write_folder(tmp_path, tree)
  refused("folder", str(tmp_path / below), *words, dir=str(tmp_path / below))


def test_folder_needs_a_folder(tmp_path):
  refused("folder", "needs data.dir")
  refused("folder", "not a folder", dir=str(tmp_path / "nowhere"))


def test_folder_of_many_sizes(tmp_path):
  write_folder(tmp_path, PETS)
  write_folder(tmp_path, ["train/dog/large.png"], size=(9, 9))
  refused("folder", "9x9", "6x5", "data.image_size", dir=str(tmp_path))
  found = load("folder", dir=str(tmp_path), image_size=Pair(4, 8))
  assert found.train.images.shape == (6, 4, 8, 3)
  expected = images.read(tmp_path / PETS[0], size=(4, 8), channels=3)
  np.testing.assert_array_equal(found.train.images[1], expected)


def spoil(root):
  """Adds four unreadable files; returns their paths."""
  whole = (root / PETS[0]).read_bytes()
  gif = io.BytesIO()
  Image.new("P", (5, 6)).save(gif, "GIF")
  contents = {
    "train/cat/broken.jpg": whole[: len(whole) // 2],
    "train/dog/empty.jpg": b"",
    "train/emu/text.jpg": b"hello",
    "test/cat/moving.jpg": gif.getvalue(),
  }
  for name, content in contents.items():
    (root / name).write_bytes(content)
  os.symlink(root / "nowhere", root / "train/dog/link.png")
  return [*contents, "train/dog/link.png"]


@pytest.mark.parametrize("memory", [1 << 30, 0])
@pytest.mark.parametrize("size", [None, Pair(4, 4)])
def test_unreadable_pictures(tmp_path, monkeypatch, memory, size):
  write_folder(tmp_path, PETS)
  clean = load("folder", dir=str(tmp_path), image_size=size)
  bad = spoil(tmp_path)
  monkeypatch.setattr(datasets, "MEMORY", memory)
  settings = {"dir": str(tmp_path), "image_size": size}
  skipping = load("folder", unreadable="skip", **settings)
  assert skipping.skipped == len(bad)
  equal(skipping.train, clean.train)
  equal(skipping.test, clean.test)
  if memory:
    refused("folder", "5 pictures cannot be read", "--check", *bad, **settings)
  else:  # nothing is decoded ahead; the error comes at the picture and names it
    lazy = load("folder", **settings)
    row = [Path(p).name for p in lazy.train.images.paths].index("broken.jpg")
    with pytest.raises(images.ImageError, match="broken.jpg"):
      lazy.train.images[row]
  assert sorted(p for p, _ in datasets.check_folder(tmp_path)) == sorted(
    str(tmp_path / name) for name in bad
  )


def test_skipping_a_whole_class_is_refused(tmp_path):
  write_folder(tmp_path, PETS)
  (tmp_path / "train/dog/x.jpeg").write_bytes(b"")
  text = refused("folder", "none of its", dir=str(tmp_path), unreadable="skip")
  assert "dog" in text


def test_folder_fingerprint(tmp_path, monkeypatch):
  write_folder(tmp_path, PETS)

  def fingerprint():
    return load("folder", dir=str(tmp_path)).fingerprint

  seen = [fingerprint()]
  Image.fromarray(noise(6, 5, 3, seed=99)).save(tmp_path / PETS[0], "PNG")
  seen.append(fingerprint())
  (tmp_path / "test/cat/2.png").rename(tmp_path / "test/emu/2.png")
  seen.append(fingerprint())
  # The same pictures in the same order: only a label changes.
  (tmp_path / "train/cat/b.PNG").rename(tmp_path / "train/dog/a0.png")
  seen.append(fingerprint())
  (tmp_path / "train/cat").rename(tmp_path / "train/cow")
  (tmp_path / "test/cat").rmdir()
  seen.append(fingerprint())
  monkeypatch.setattr(datasets, "MEMORY", 0)
  seen.append(fingerprint())
  with open(tmp_path / "train/cow/a.jpg", "ab") as file:
    file.write(b"more")
  seen.append(fingerprint())
  (tmp_path / "train/dog/x.jpeg").rename(tmp_path / "train/dog/y.jpeg")
  seen.append(fingerprint())
  assert len(set(seen)) == len(seen) and seen[-1] == fingerprint()


def test_lazy_equals_array(tmp_path, monkeypatch):
  write_folder(tmp_path, PETS)
  settings = {"dir": str(tmp_path), "image_size": Pair(4, 4), "val": 2, "seed": 5}
  array = load("folder", **settings)
  monkeypatch.setattr(datasets, "MEMORY", 0)
  lazy = load("folder", **settings)
  for name in ("train", "val", "test"):
    one, other = getattr(array, name), getattr(lazy, name)
    assert not isinstance(other.images, np.ndarray)
    assert other.images.shape == one.images.shape and len(other) == len(other.images)
    np.testing.assert_array_equal(one.labels, other.labels)
    with ThreadPoolExecutor(4) as pool:
      rows = list(pool.map(other.images.__getitem__, range(len(other))))
    np.testing.assert_array_equal(np.stack(rows), one.images)
    again = pickle.loads(pickle.dumps(other.images))
    np.testing.assert_array_equal(again[0], one.images[0])


# --- TFDS -----------------------------------------------------------------------------

tfds = pytest.importorskip("tensorflow_datasets")


class VitJaxTiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Encoded pictures need no TensorFlow, so a real set can be prepared here."""

  VERSION = tfds.core.Version("1.0.0")
  shape = (None, None, 3)
  counts = {"train": 10, "validation": 4, "test": 6}
  unlabelled = ()
  features = None
  many = False

  def _info(self):
    features = self.features or {
      "image": tfds.features.Image(shape=self.shape),
      "label": tfds.features.ClassLabel(names=["a", "b"]),
      "id": tfds.features.Text(),
    }
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, _):
    return {name: self._generate_examples(name) for name in self.counts}

  def _generate_examples(self, name):
    for k in range(self.counts[name]):
      height = self.shape[0] or 5 + k
      pixels = noise(height, self.shape[1] or 6, self.shape[2], seed=k)
      buffer = io.BytesIO()
      Image.fromarray(pixels.squeeze()).save(buffer, "PNG")
      label = -1 if name in self.unlabelled else k % 2
      yield (
        k,
        {
          "image": buffer.getvalue(),
          "label": [label] if self.many else label,
          "id": str(k),
        },
      )


def prepared(folder, **changes):
  """Prepares a set; returns its name, for `data.name`."""
  kind = type("VitJaxTiny", (VitJaxTiny,), changes, skip_registration=True)
  kind.name = "vit_jax_tiny"
  builder = kind(data_dir=str(folder), file_format="array_record")
  builder.download_and_prepare()
  return "tfds:vit_jax_tiny"


def by_id(folder, split):
  """What TFDS itself decodes: [(image, label)], in its order."""
  builder = tfds.builder("vit_jax_tiny", data_dir=str(folder))
  return [(r["image"], r["label"]) for r in builder.as_data_source(split=split)]


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_tfds(tmp_path, monkeypatch, memory):
  name = prepared(tmp_path)
  monkeypatch.setattr(datasets, "MEMORY", memory)
  refused(name, "many sizes", "data.image_size", dir=str(tmp_path))
  found = load(name, dir=str(tmp_path), image_size=Pair(4, 4))
  assert found.classes == ("a", "b") and found.mean == (0.5,) * 3
  for split, source in (("train", "train"), ("val", "validation"), ("test", "test")):
    ours, theirs = getattr(found, split), by_id(tmp_path, source)
    assert ours.images.shape == (len(theirs), 4, 4, 3)
    assert isinstance(ours.images, np.ndarray) == bool(memory)
    assert ours.labels.tolist() == [label for _, label in theirs]
    for row, (image, _) in enumerate(theirs):
      np.testing.assert_array_equal(ours.images[row], images.resize(image, (4, 4)))
  assert "tensorflow" not in sys.modules


def test_tfds_of_one_size_in_grey(tmp_path, monkeypatch):
  name = prepared(tmp_path, shape=(5, 6, 1), counts={"train": 10, "validation": 4})
  found = load(f"{name}:1.0.0", dir=str(tmp_path), val=0.2)
  assert found.train.images.shape == (8, 5, 6, 1) and found.val.images.shape[0] == 2
  assert found.test.images.shape == (4, 5, 6, 1)  # validation, as there is no test
  assert found.mean == (0.5,)
  monkeypatch.setattr(datasets, "MEMORY", 0)
  lazy = load(name, dir=str(tmp_path), val=0.2)
  for one, other in ((found.train, lazy.train), (found.val, lazy.val)):
    np.testing.assert_array_equal(other.labels, one.labels)
    np.testing.assert_array_equal(np.stack(list(other.images)), one.images)


def test_tfds_unlabelled_test(tmp_path):
  name = prepared(tmp_path, unlabelled=("test",), shape=(5, 6, 3))
  found = load(name, dir=str(tmp_path))
  assert found.val is None and len(found.test) == 4
  assert "unlabelled" in found.note


def test_tfds_labels_of_a_large_set_are_kept(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.setattr(datasets, "LABELS_KEPT_FROM", 5)
  name = prepared(tmp_path / "sets", shape=(5, 6, 3))
  first = load(name, dir=str(tmp_path / "sets"))
  (kept,) = (tmp_path / ".cache/vit_jax").iterdir()
  equal(first.train, load(name, dir=str(tmp_path / "sets")).train)
  with np.load(kept) as arrays:
    changed = {split: 1 - arrays[split] for split in arrays}
  np.savez(kept, **changed)
  again = load(name, dir=str(tmp_path / "sets"))
  np.testing.assert_array_equal(again.train.labels, 1 - first.train.labels)


def test_tfds_refusals(tmp_path):
  folder = str(tmp_path)
  refused(
    "tfds:mnist", "not prepared", "scripts/prepare_data.py --dataset=mnist", dir=folder
  )
  refused("tfds:mnisst", "not found", "did you mean 'mnist'", dir=folder)
  refused("tfds:mnist:0.0.1", "0.0.1", dir=folder)


def test_tfds_sets_of_another_kind(tmp_path):
  def features(**changes):
    known = {
      "image": tfds.features.Image(shape=(5, 6, 3)),
      "label": tfds.features.ClassLabel(names=["a", "b"]),
      "id": tfds.features.Text(),
    }
    return known | changes

  several = tfds.features.Sequence(tfds.features.ClassLabel(names=["a", "b"]))
  name = prepared(
    tmp_path / "0", features=features(label=several), shape=(5, 6, 3), many=True
  )
  refused(name, "expected an image", dir=str(tmp_path / "0"))
  name = prepared(tmp_path / "1", shape=(5, 6, 3), counts={"train": 4})
  refused(name, "splits ['train']", dir=str(tmp_path / "1"))
  name = prepared(tmp_path / "2", shape=(5, 6, 3))
  (about,) = (tmp_path / "2").rglob("dataset_info.json")
  about.write_text(about.read_text().replace('"array_record"', '"tfrecord"'))
  refused(name, "no random access", dir=str(tmp_path / "2"))


# --- scripts/prepare_data.py ----------------------------------------------------------


def script():
  path = ROOT / "scripts" / "prepare_data.py"
  spec = importlib.util.spec_from_file_location("prepare_data", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_check_lists_every_bad_file(tmp_path):
  write_folder(tmp_path, PETS)
  command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--check"]
  command += ["--dataset=folder", f"--data_dir={tmp_path}"]
  environment = dict(os.environ, PYTHONPATH=str(ROOT))

  def run():
    return subprocess.run(
      command, capture_output=True, text=True, env=environment, check=False
    )

  fine = run()
  assert fine.returncode == 0, fine.stderr
  bad = spoil(tmp_path)
  found = run()
  assert found.returncode == 1
  lines = found.stdout.strip().splitlines()
  assert len(lines) == len(bad) + 1
  for name in bad:
    assert sum(str(tmp_path / name) in line for line in lines) == 1


def test_prepare_without_tensorflow(monkeypatch, capsys):
  module = script()
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
  assert module.prepare("cifar10", None) == 2
  error = capsys.readouterr().err
  assert "vit_jax[prepare]" in error and error.count("\n") == 1
  assert module.check("synthetic", None) == 0
  assert "320 training and 160 test" in capsys.readouterr().out


def test_dataset_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    load("synthetic").name = "other"

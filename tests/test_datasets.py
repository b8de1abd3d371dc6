"""What is common to all image sets."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sources import equal, load, refused

from vit_jax.config import ConfigError, Pair
from vit_jax.data import datasets, images, lazy

ROOT = Path(__file__).parents[1]


def test_unknown_name_gets_the_nearest():
  refused("fasion_mnist", "did you mean 'fashion_mnist'")
  refused("imagenet", "known:", "tfds:NAME")
  refused("tfds", "is no data set")


def test_imports_neither_jax_nor_tensorflow():
  files = ("datasets", "split", "lazy", "arrays", "cifar", "folder", "tfds", "images")
  for file in files:
    tree = ast.parse((ROOT / "vit_jax" / "data" / f"{file}.py").read_text())
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


def test_a_test_split_that_cannot_be_measured_is_refused(monkeypatch):
  monkeypatch.setitem(datasets.SOURCES, "made up", made_up([0, 1], [-1, -1]))
  refused("made up", "no test image has a label")


def test_splits_must_agree(monkeypatch):
  source = made_up([0, 1])

  def taller(data, seed):
    made = source(data, seed)
    other = datasets.Split(np.zeros((2, 3, 2, 1), np.uint8), made.test.labels)
    return dataclasses.replace(made, test=other)

  def twice(data, seed):
    return dataclasses.replace(source(data, seed), classes=("a", "a"))

  monkeypatch.setitem(datasets.SOURCES, "made up", taller)
  refused("made up", "train has 2x2x1, test has 3x2x1", "set data.image_size")
  assert load("made up", image_size=Pair(4, 4)).test.images.shape == (2, 4, 4, 1)
  monkeypatch.setitem(datasets.SOURCES, "made up", twice)
  refused("made up", "several classes are called ['a']")


def test_a_folder_is_refused_where_none_is_read(tmp_path):
  refused("digits", "reads no files", dir=str(tmp_path))
  refused("mnist", "is empty", dir="")


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


def test_train_size_keeps_the_same_share_of_every_class():
  whole = load("synthetic", val=80, seed=3)
  some = load("synthetic", val=80, train_size=60, seed=3)
  assert np.bincount(some.train.labels).tolist() == [6] * 10
  equal(whole.val, some.val)
  equal(whole.test, some.test)
  assert whole.fingerprint == some.fingerprint
  known = {i.tobytes() for i in whole.train.images}
  used = {i.tobytes() for i in some.train.images}
  assert len(used) == 60 and used <= known
  equal(some.train, load("synthetic", val=80, train_size=0.25, seed=3).train)
  other = load("synthetic", val=80, train_size=60, seed=4)
  assert used != {i.tobytes() for i in other.train.images}


def test_train_size_of_all_changes_nothing():
  equal(load("synthetic").train, load("synthetic", train_size=320).train)
  refused("synthetic", "data.train_size=321 takes 321 of 320", train_size=321)
  refused("synthetic", "data.train_size=0 takes 0 of 320", train_size=0)
  refused("synthetic", "data.train_size=1.5", "whole number", train_size=1.5)


def test_resizing():
  small, large = load("digits"), load("digits", image_size=Pair(6, 12), val=0.1)
  assert large.train.images.shape[1:] == (6, 12, 1) == large.val.images.shape[1:]
  expected = images.resize(small.test.images[3], (6, 12))
  np.testing.assert_array_equal(large.test.images[3], expected)
  assert large.fingerprint == small.fingerprint
  refused("digits", "data.image_size=(0, 4)", image_size=Pair(0, 4))


def test_box_is_the_average_of_what_falls_into_a_pixel(monkeypatch):
  large = load("digits").test.images
  settings = {"image_size": Pair(4, 4), "interpolation": "box"}
  found = load("digits", **settings).test.images
  cells = large.reshape(-1, 4, 2, 4, 2, 1).mean((2, 4))
  # Pillow rounds twice, by rows and by columns.
  assert np.abs(found - cells).max() <= 1
  # Of the bicubic default that is not so: it weighs pixels of other cells as well.
  assert np.abs(load("digits", image_size=Pair(4, 4)).test.images - cells).max() > 5
  monkeypatch.setattr(lazy, "MEMORY", 1000)
  lazily = load("digits", **settings).test
  np.testing.assert_array_equal(np.stack(list(lazily.images)), found)


def test_resizing_to_more_than_memory_is_lazy(monkeypatch):
  array = load("digits", image_size=Pair(5, 7), val=20)
  monkeypatch.setattr(lazy, "MEMORY", 1000)
  streamed = load("digits", image_size=Pair(5, 7), val=20)
  for name in ("train", "val", "test"):
    one, other = getattr(array, name), getattr(streamed, name)
    assert not isinstance(other.images, np.ndarray)
    assert other.images.shape == one.images.shape and len(other) == len(other.images)
    np.testing.assert_array_equal(other.labels, one.labels)
    np.testing.assert_array_equal(np.stack(list(other.images)), one.images)
  assert isinstance(load("digits").train.images, np.ndarray)


def test_dataset_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    load("synthetic").name = "other"

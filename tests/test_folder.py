"""Folders of pictures, written here."""

import io
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sources import equal, load, noise, refused

from vit_jax import config
from vit_jax.config import ConfigError, Pair
from vit_jax.data import folder, images, lazy

ROOT = Path(__file__).parents[1]


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
  settings = {"dir": str(tmp_path), "image_size": Pair(4, 8)}
  for name in ("bicubic", "box"):
    found = load("folder", interpolation=name, **settings)
    assert found.train.images.shape == (6, 4, 8, 3)
    expected = images.read(
      tmp_path / PETS[0], size=(4, 8), channels=3, interpolation=name
    )
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
  monkeypatch.setattr(lazy, "MEMORY", memory)
  settings = {"dir": str(tmp_path), "image_size": size}
  skipping = load("folder", unreadable="skip", **settings)
  assert skipping.skipped == len(bad)
  equal(skipping.train, clean.train)
  equal(skipping.test, clean.test)
  if memory:
    refused("folder", "5 pictures cannot be read", "--check", *bad, **settings)
  else:  # nothing is decoded ahead; the error comes at the picture and names it
    streamed = load("folder", **settings)
    row = [Path(p).name for p in streamed.train.images.paths].index("broken.jpg")
    with pytest.raises(images.ImageError, match="broken.jpg"):
      streamed.train.images[row]
  assert sorted(p for p, _ in folder.check(tmp_path)) == sorted(
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
  monkeypatch.setattr(lazy, "MEMORY", 0)
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
  monkeypatch.setattr(lazy, "MEMORY", 0)
  streamed = load("folder", **settings)
  for name in ("train", "val", "test"):
    one, other = getattr(array, name), getattr(streamed, name)
    assert not isinstance(other.images, np.ndarray)
    assert other.images.shape == one.images.shape and len(other) == len(other.images)
    np.testing.assert_array_equal(one.labels, other.labels)
    with ThreadPoolExecutor(4) as pool:
      rows = list(pool.map(other.images.__getitem__, range(len(other))))
    np.testing.assert_array_equal(np.stack(rows), one.images)
    again = pickle.loads(pickle.dumps(other.images))
    np.testing.assert_array_equal(again[0], one.images[0])


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


# --- a folder of some classes of a model ----------------------------------------------


def load_for_classes(root, classes, **settings):
  return folder.load_for_classes(
    config.Data(name="folder", dir=str(root), **settings), classes
  )


def test_classes_of_a_model_are_found_by_name(tmp_path):
  write_folder(tmp_path, ["d/1.png", "b/2.png", "b/1.png", "d/deep/0.png"])
  found = load_for_classes(tmp_path, ("a", "b", "c", "d", "e"))
  assert found.labels.tolist() == [1, 1, 3, 3] and found.labels.dtype == np.int32
  for row, name in enumerate(["b/1.png", "b/2.png", "d/1.png", "d/deep/0.png"]):
    expected = np.asarray(Image.open(tmp_path / name))
    np.testing.assert_array_equal(found.images[row], expected)
  # The order is the model's, not the alphabet's.
  found = load_for_classes(tmp_path, ["d", "x", "b"], image_size=Pair(4, 4))
  assert found.labels.tolist() == [2, 2, 0, 0]
  assert found.images.shape == (4, 4, 4, 3)


def test_classes_that_the_model_does_not_know_are_refused(tmp_path):
  write_folder(tmp_path, ["b/1.png", "z/1.png"])
  with pytest.raises(ConfigError, match="no class of the model: z; it knows a, b"):
    load_for_classes(tmp_path, ("a", "b"))
  write_folder(tmp_path / "above", ["test/a/1.png", "train/a/1.png"])
  with pytest.raises(ConfigError, match="try .*above/test$"):
    load_for_classes(tmp_path / "above", ("a", "b"))
  write_folder(tmp_path / "flat", ["1.png", "2.png"])
  with pytest.raises(ConfigError, match="found 2 pictures with no class folder"):
    load_for_classes(tmp_path / "flat", ("a", "b"))
  with pytest.raises(ConfigError, match="not a folder"):
    load_for_classes(tmp_path / "nowhere", ("a", "b"))


def test_unreadable_pictures_of_such_a_folder(tmp_path, caplog):
  write_folder(tmp_path, ["b/1.png", "b/3.png", "loose.png"])
  (tmp_path / "b/2.png").write_bytes(b"")
  with pytest.raises(ConfigError, match="1 pictures cannot be read.*2.png"):
    load_for_classes(tmp_path, ("a", "b"))
  found = load_for_classes(tmp_path, ("a", "b"), unreadable="skip")
  assert found.labels.tolist() == [-1, 1, 1] and len(found.images) == 3
  assert "1 pictures cannot be read" in caplog.text

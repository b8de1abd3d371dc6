"""TFDS sets, prepared here without TensorFlow."""

import importlib.util
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sources import load, noise, refused

from vit_jax.config import ConfigError, Pair
from vit_jax.data import images, lazy

tfds = pytest.importorskip("tensorflow_datasets")

ROOT = Path(__file__).parents[1]


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
  monkeypatch.setattr(lazy, "MEMORY", memory)
  refused(name, "many sizes", "data.image_size", dir=str(tmp_path))
  settings = {"image_size": Pair(4, 4), "interpolation": "box"}
  found = load(name, dir=str(tmp_path), **settings)
  assert found.classes == ("a", "b") and found.mean == (0.5,) * 3
  for split, source in (("train", "train"), ("val", "validation"), ("test", "test")):
    ours, theirs = getattr(found, split), by_id(tmp_path, source)
    assert ours.images.shape == (len(theirs), 4, 4, 3)
    assert isinstance(ours.images, np.ndarray) == bool(memory)
    assert ours.labels.tolist() == [label for _, label in theirs]
    for row, (image, _) in enumerate(theirs):
      expected = images.resize(image, (4, 4), "box")
      np.testing.assert_array_equal(ours.images[row], expected)
  assert "tensorflow" not in sys.modules


def test_tfds_of_one_size_in_grey(tmp_path, monkeypatch):
  name = prepared(tmp_path, shape=(5, 6, 1), counts={"train": 10, "validation": 4})
  found = load(f"{name}:1.0.0", dir=str(tmp_path), val=0.2)
  assert found.train.images.shape == (8, 5, 6, 1) and found.val.images.shape[0] == 2
  assert found.test.images.shape == (4, 5, 6, 1)  # validation, as there is no test
  assert found.mean == (0.5,)
  monkeypatch.setattr(lazy, "MEMORY", 0)
  streamed = load(name, dir=str(tmp_path), val=0.2)
  for one, other in ((found.train, streamed.train), (found.val, streamed.val)):
    np.testing.assert_array_equal(other.labels, one.labels)
    np.testing.assert_array_equal(np.stack(list(other.images)), one.images)


def test_tfds_unlabelled_test(tmp_path):
  name = prepared(tmp_path, unlabelled=("test",), shape=(5, 6, 3))
  found = load(name, dir=str(tmp_path))
  assert found.val is None and len(found.test) == 4
  assert "unlabelled" in found.note


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


def test_prepare_without_tensorflow(monkeypatch, capsys):
  module = script()
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
  with pytest.raises(ConfigError, match=r"-e '\.\[prepare\]'"):
    module.prepare("cifar10", None)
  assert module.check("synthetic", None) == 0
  assert "320 training and 160 test" in capsys.readouterr().out

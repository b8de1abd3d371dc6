"""A picture file gets what evaluation gives for the same image."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tiny
from PIL import Image

import vit_jax
from vit_jax import checkpoint, evaluate, predict, train
from vit_jax.config import ConfigError
from vit_jax.data import datasets, images
from vit_jax.data.split import Split

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tiny") / "run"
  settings = tiny.make(
    model__depth=1,
    optim__warmup="0 steps",
    train__length="2 steps",
    train__steps_per_call=2,
    train__checkpoint_every="2 steps",
    train__log_every="2 steps",
    model__dropout=0.5,
    optim__ema=0.9,
    data__interpolation="box",
  )
  train.run(settings, folder)
  return folder


@pytest.fixture(scope="module")
def pictures(run, tmp_path_factory):
  """Returns the first five test images as PNG files, and as a split."""
  dataset = datasets.load(checkpoint.read_config(run)["config"].data, 0)
  folder = tmp_path_factory.mktemp("pictures of it")
  files = [folder / f"{i}.png" for i in range(5)]
  for file, image in zip(files, dataset.test.images):
    Image.fromarray(image).save(file)
  return files, Split(dataset.test.images[:5], dataset.test.labels[:5])


@pytest.mark.parametrize("ema", [False, True])
def test_probabilities_are_those_of_evaluation(run, pictures, ema):
  files, split = pictures
  found, failed = predict.run(run, files, top=10, ema=ema)
  assert failed == {} and [f["file"] for f in found] == [str(f) for f in files]
  model, params, settings = vit_jax.load(run, ema=ema)
  content = checkpoint.read_config(run)
  layout, hypers = evaluate.evaluator(settings, model, None, content["data"])
  import jax

  placed = layout.put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], params))
  (values,) = evaluate.values(layout, placed, hypers, [split], 4)
  classes = content["data"]["classes"]
  for i, item in enumerate(found):
    chances = [p["probability"] for p in item["predictions"]]
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1, abs=1e-5)
    names = [p["class"] for p in item["predictions"]]
    assert sorted(names) == sorted(classes)
    assert names[0] == classes[values["predicted"][i]]
    assert chances[0] == pytest.approx(float(values["confidence"][i]), abs=1e-6)
    right = chances[names.index(classes[split.labels[i]])]
    assert -np.log(right) == pytest.approx(float(values["loss"][i]), abs=2e-6)


def test_more_pictures_than_a_batch(run, pictures, monkeypatch):
  files, _ = pictures
  alone, _ = predict.run(run, files, top=2)
  monkeypatch.setattr(predict, "BATCH", 2)
  found, _ = predict.run(run, files, top=2)
  for one, other in zip(alone, found, strict=True):
    assert one["file"] == other["file"]
    for p, q in zip(one["predictions"], other["predictions"], strict=True):
      assert p["class"] == q["class"]
      assert p["probability"] == pytest.approx(q["probability"], abs=1e-6)


def test_pictures_are_resized_as_in_training(run, tmp_path):
  large = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
  for name, pixels in (
    ("large", large),
    ("small", images.resize(large, (8, 8), "box")),
  ):
    Image.fromarray(pixels).save(tmp_path / f"{name}.png")
  found, _ = predict.run(run, [tmp_path / "large.png", tmp_path / "small.png"], top=10)
  assert found[0]["predictions"] == found[1]["predictions"]


def test_top_is_a_number_of_classes(run, pictures):
  files, _ = pictures
  found, _ = predict.run(run, files[:1], top=50)
  assert len(found[0]["predictions"]) == 10
  found, _ = predict.run(run, files[:1], top=3)
  assert len(found[0]["predictions"]) == 3
  for top in (0, -1):
    with pytest.raises(ConfigError, match=f"top={top}"):
      predict.run(run, files[:1], top=top)


def test_bad_files_are_named_and_the_others_predicted(run, pictures, tmp_path):
  """By the script, for its exit code too."""
  files, _ = pictures
  broken, text = tmp_path / "broken.png", tmp_path / "text.jpg"
  broken.write_bytes(files[0].read_bytes()[:-40])
  text.write_text("no picture")
  bad = [broken, text, tmp_path / "missing.png", tmp_path]
  out = tmp_path / "out.json"
  arguments = [files[0], *bad, files[1]]
  done = subprocess.run(
    [sys.executable, ROOT / "scripts" / "predict.py", f"--workdir={run}", "--top=2"]
    + [f"--out={out}", *arguments],
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  assert done.returncode == 2, done.stderr
  for file in bad:
    assert f"error: {file}: " in done.stderr
  assert "Traceback" not in done.stderr
  assert done.stdout.count("\n") == 2
  written = json.loads(out.read_text())
  expected, failed = predict.run(run, arguments, top=2)
  assert list(failed) == [str(file) for file in bad] == list(written["failed"])
  assert [p["file"] for p in written["pictures"]] == [p["file"] for p in expected]
  assert predict.run(run, bad[:2])[0] == []

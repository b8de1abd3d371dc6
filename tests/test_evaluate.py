"""Every example counted once; numbers against NumPy in float64 and scikit-learn."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
import tiny
from PIL import Image

from vit_jax import checkpoint, config, evaluate, losses, train
from vit_jax.config import Config, ConfigError
from vit_jax.data import datasets
from vit_jax.data.split import Split

THREE = ("cat", "dog", "eel")
KEYS = {
  "schema",
  "step",
  "ema",
  "member",
  "split",
  "examples",
  "unlabelled",
  "accuracy",
  "top5",
  "loss",
  "ece",
  "per_class",
  "confusion",
  "images_per_second",
}


class PixelsAreLogits:
  """A model whose logits are its pixels: what it answers can be computed by hand."""

  def apply(self, variables, images, keys=None, hyper=None):
    del keys, hyper
    return images[:, 0, :, 0] * variables["params"]["factor"]


class Lazy:
  """A set that is read one image at a time."""

  def __init__(self, images):
    self._images, self.shape, self.read = images, images.shape, []

  def __len__(self):
    return len(self._images)

  def __getitem__(self, i):
    self.read.append(int(i))
    return self._images[i]


def five(labels=(0, 1, 2, 0, 1)):
  """Five images; four of these labels are right, the last is wrong."""
  logits = [[9, 2, 1], [3, 7, 3], [0, 1, 5], [8, 7, 6], [1, 4, 9]]
  images = np.array(logits, np.uint8)[:, None, :, None]
  return Split(images, np.array(labels, np.int32)), np.array(logits, np.float64)


@pytest.fixture(scope="module")
def answers():
  """Returns values(split, batch_size) of the model above."""
  data = {"shape": (1, 3, 1), "classes": THREE, "mean": (0.0,), "std": (1 / 255,)}
  layout, hypers = evaluate.evaluator(Config(), PixelsAreLogits(), None, data)
  params = layout.put({"factor": np.ones(1, np.float32)})

  def values(split, batch_size):
    return evaluate.values(layout, params, hypers, [split], batch_size)[0]

  return values


def log_softmax(logits):
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64])
@pytest.mark.parametrize("lazy", [False, True])
def test_no_batch_size_changes_the_numbers(answers, size, lazy):
  split, logits = five()
  if lazy:
    split = Split(Lazy(split.images), split.labels)
  found = answers(split, size)
  assert all(len(value) == 5 for value in found.values())
  metrics = evaluate.metrics(found)
  expected = -log_softmax(logits)[np.arange(5), split.labels].mean()
  assert metrics.keys() == {"loss", "accuracy"}
  assert metrics["accuracy"] == 0.8
  assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
  np.testing.assert_array_equal(found["predicted"], logits.argmax(-1))
  np.testing.assert_allclose(
    found["confidence"], np.exp(log_softmax(logits)).max(-1), rtol=1e-6
  )
  if lazy:
    # Once each, in whatever order the threads come.
    assert sorted(split.images.read) == list(range(5))


def test_unlabelled_examples_are_masked_and_counted(answers):
  split, logits = five((0, -1, -1, 1, -1))
  found = evaluate.report(answers(split, 4), THREE)
  expected = -log_softmax(logits)[[0, 3], [0, 1]].mean()
  assert (found["examples"], found["unlabelled"]) == (2, 3)
  assert found["accuracy"] == 0.5
  assert found["loss"] == pytest.approx(expected, rel=1e-6)
  assert found["per_class"] == {"cat": 1.0, "dog": 0.0, "eel": None}
  assert np.sum(found["confusion"]) == 2
  split, _ = five((-1,) * 5)
  with pytest.raises(ConfigError, match="no example of this split has a label"):
    evaluate.report(answers(split, 4), THREE)


def test_confusion_and_classes_are_those_of_scikit_learn():
  draw = np.random.default_rng(0)
  label = draw.integers(-1, 4, 200)
  label[label == 3] = 2  # class 3 has no example
  predicted = draw.integers(0, 4, 200)
  values = {
    "label": label,
    "predicted": predicted,
    "loss": draw.random(200),
    "confidence": draw.random(200),
  }
  found = evaluate.report(values, ("a", "b", "c", "d"))
  known = label >= 0
  expected = sklearn.metrics.confusion_matrix(
    label[known], predicted[known], labels=range(4)
  )
  np.testing.assert_array_equal(found["confusion"], expected)
  recall = sklearn.metrics.recall_score(
    label[known], predicted[known], labels=range(3), average=None
  )
  assert list(found["per_class"].values()) == [*recall, None]
  assert found["accuracy"] == sklearn.metrics.accuracy_score(
    label[known], predicted[known]
  )
  assert found["loss"] == pytest.approx(values["loss"][known].mean())
  json.dumps(found, allow_nan=False)


def slow_calibration_error(confidence, right, bins=15):
  total = 0.0
  for b in range(bins):
    members = [
      i
      for i, c in enumerate(confidence)
      if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)
    ]
    if members:
      accuracy = sum(bool(right[i]) for i in members) / len(members)
      mean = math.fsum(float(confidence[i]) for i in members) / len(members)
      total += len(members) / len(confidence) * abs(accuracy - mean)
  return total


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_calibration_error(dtype):
  draw = np.random.default_rng(0)
  edges = np.arange(16) / 15
  confidence = np.concatenate([draw.random(300), edges, edges, [1.0, 1.0]])
  confidence = confidence.astype(dtype)
  right = draw.random(len(confidence)) < 0.6
  assert evaluate.calibration_error(confidence, right) == pytest.approx(
    slow_calibration_error(confidence.astype(np.float64), right), abs=1e-12
  )
  # Certain and right; certain and wrong; in two bins that do not cancel.
  assert evaluate.calibration_error([1.0, 1.0], [True, True]) == 0
  assert evaluate.calibration_error([1.0], [False]) == 1
  assert evaluate.calibration_error([0.5, 0.9], [True, False]) == pytest.approx(0.7)


def test_a_value_of_ones_own_is_averaged_over_labelled_examples():
  found = {
    "label": np.array([0, 1, -1]),
    "loss": np.ones(3),
    "predicted": np.array([0, 1, 2]),
    "confidence": np.ones(3),
    "brier": np.array([1.0, 2.0, 30.0]),
  }
  assert evaluate.metrics(found)["brier"] == 1.5
  assert evaluate.report(found, ("a", "b", "c"))["brier"] == 1.5
  plain = {"label": np.array([-1, -1]), "loss": np.ones(2), "psnr": np.array([1.0, 4])}
  assert evaluate.metrics(plain) == {"loss": 1.0, "psnr": 2.5}


def test_top5_is_that_of_a_sort():
  """Of equal logits the lower class comes first, as in a stable sort."""
  draw = np.random.default_rng(0)
  logits = np.round(draw.normal(size=(64, 9)) * 2).astype(np.float32)  # many ties
  label = draw.integers(-1, 9, 64).astype(np.int32)

  def classify(logits):
    return losses.Classification().evaluate(
      lambda images, hyper: images,  # noqa: ARG005
      {"image": jnp.asarray(logits), "label": jnp.asarray(label)},
      {"model": {}},
    )

  found = classify(logits)
  order = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
  np.testing.assert_array_equal(found["top5"], (order == label[:, None]).any(-1))
  assert "top5" in classify(logits[:, :6]) and "top5" not in classify(logits[:, :5])


def test_sigmoid_loss_and_confidence():
  logits, label = np.array([[2.0, -1.0, 0.5]]), 2
  found = losses.make(config.Loss(name="sigmoid")).evaluate(
    lambda images, hyper: images,  # noqa: ARG005
    {"image": jnp.asarray(logits, jnp.float32), "label": jnp.array([label])},
    {"model": {}},
  )
  p = 1 / (1 + np.exp(-logits))
  expected = -np.log(np.where(np.arange(3) == label, p, 1 - p)).sum()
  assert float(found["loss"][0]) == pytest.approx(expected, rel=1e-6)
  assert float(found["confidence"][0]) == pytest.approx(p.max(), rel=1e-6)


# ------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns a run with dropout everywhere, and the metrics that it returned."""
  folder = tmp_path_factory.mktemp("tiny") / "run"
  settings = tiny.make(
    model__depth=1,
    model__dropout=0.5,
    model__drop_path=0.5,
    data__val=0.25,
    data__eval_batch_size=28,  # of 160: the last batch is padded
    optim__ema=0.5,
    train__length="4 steps",
    train__steps_per_call=2,
    train__eval_every="2 steps",
    train__checkpoint_every="2 steps",
    train__log_every="2 steps",
    train__best_metric="val/loss",
  )
  (result,) = train.run(settings, folder).values()
  return folder, result


def logged(folder, step):
  rows = [json.loads(r) for r in (folder / "metrics.jsonl").read_text().splitlines()]
  (row,) = [r for r in rows if r["step"] == step]
  return row


@pytest.mark.parametrize("ema", [False, True])
def test_evaluation_repeats_what_training_said(run, ema):
  folder, result = run
  found = evaluate.run(folder, ema=ema)
  suffix = "_ema" if ema else ""
  for name in ("loss", "accuracy", "top5"):
    assert found[name] == result[f"test{suffix}/{name}"], name
    assert found[name] == logged(folder, 4)[f"test{suffix}/{name}"], name
  assert found.keys() == KEYS
  head = {"schema": 1, "step": 4, "ema": ema, "member": None, "split": "test"}
  assert head.items() <= found.items()
  assert (found["examples"], found["unlabelled"]) == (160, 0)
  assert np.shape(found["confusion"]) == (10, 10) and np.sum(found["confusion"]) == 160
  assert np.trace(found["confusion"]) / 160 == pytest.approx(found["accuracy"])
  assert 0 <= found["ece"] <= 1 and found["images_per_second"] > 0
  name = "test-4-ema.json" if ema else "test-4.json"
  assert json.loads((folder / "evaluations" / name).read_text()) == found
  # Twice the same, in spite of dropout.
  again = evaluate.run(folder, ema=ema)
  drop = ("images_per_second",)
  assert {k: v for k, v in again.items() if k not in drop} == {
    k: v for k, v in found.items() if k not in drop
  }


def test_any_step_and_split(run):
  folder, _ = run
  early = evaluate.run(folder, step=2, split="val")
  assert early["loss"] == logged(folder, 2)["val/loss"]
  assert early["examples"] == 80 and early["step"] == 2
  best = evaluate.run(folder, step="best", split="val")
  assert best["loss"] == min(logged(folder, n)["val/loss"] for n in (2, 4))
  by_folder = evaluate.run(folder / "checkpoints" / "2", split="val")
  assert by_folder["loss"] == early["loss"] and by_folder["step"] == 2
  assert (folder / "evaluations" / "val-2.json").exists()
  with pytest.raises(ConfigError, match="split='tset': this data has train, val, test"):
    evaluate.run(folder, split="tset")


def test_a_member_by_number_or_name(run):
  folder, result = run
  found = evaluate.run(folder, member="0")
  assert found["loss"] == result["test/loss"] and found["member"] == "0"
  with pytest.raises(ConfigError, match="member='1'"):
    evaluate.run(folder, member="1")


def test_other_data_is_refused(run):
  folder, _ = run
  content = checkpoint.read_config(folder)
  dataset = datasets.load(content["config"].data, 0)
  other = dataclasses.replace(dataset, fingerprint="0" * 64)
  with pytest.raises(ConfigError, match="'synthetic'.*fingerprint 000000000000"):
    evaluate.run(folder, data=other)
  renamed = dataclasses.replace(dataset, classes=("zero", *dataset.classes[1:]))
  with pytest.raises(ConfigError, match="trained on classes .*'zero'") as caught:
    evaluate.run(folder, data=renamed)
  assert "\n" not in str(caught.value)
  without = dataclasses.replace(dataset, val=None)
  with pytest.raises(ConfigError, match="this data has train, test$"):
    evaluate.run(folder, data=without, split="val")


def test_a_lazy_split_gives_the_same_numbers(run):
  folder, result = run
  dataset = datasets.load(checkpoint.read_config(folder)["config"].data, 0)
  split = Split(Lazy(dataset.test.images), dataset.test.labels)
  found = evaluate.run(folder, data=dataclasses.replace(dataset, test=split))
  assert found["loss"] == result["test/loss"]


def test_pictures_of_some_classes_are_matched_by_name(run, tmp_path):
  """The test images, as files in folders of two of the classes, in another order."""
  folder, _ = run
  content = checkpoint.read_config(folder)
  dataset = datasets.load(content["config"].data, 0)
  chosen = [7, 3]
  for k in chosen:
    (tmp_path / content["data"]["classes"][k]).mkdir()
    for i in np.flatnonzero(dataset.test.labels == k):
      file = tmp_path / content["data"]["classes"][k] / f"{i}.png"
      Image.fromarray(dataset.test.images[i]).save(file)
  found = evaluate.run(folder, pictures=tmp_path)
  whole = evaluate.run(folder)
  assert found["confusion"][3] == whole["confusion"][3]
  assert found["confusion"][7] == whole["confusion"][7]
  assert found["examples"] == int(np.isin(dataset.test.labels, chosen).sum())
  assert found["pictures"] == str(tmp_path) and found["split"] == "pictures"
  (file,) = (folder / "evaluations").glob(f"pictures-{tmp_path.name}-*-4.json")
  assert json.loads(file.read_text()) == found
  with pytest.raises(ConfigError, match="takes the place of split= and data_dir="):
    evaluate.run(folder, pictures=tmp_path, split="val")
  (tmp_path / "no class of it").mkdir()
  with pytest.raises(ConfigError, match="no class of the model: no class of it"):
    evaluate.run(folder, pictures=tmp_path)


def test_evaluation_ignores_dropout(run):
  """Equal to the plain forward pass of a model without any."""
  folder, _ = run
  model, params, settings = checkpoint.load(folder)
  quiet = config.override(settings, {"model.dropout": 0, "model.drop_path": 0})
  content = {**checkpoint.read_config(folder), "config": quiet}
  dataset = datasets.load(settings.data, 0)
  images = jnp.asarray(dataset.test.images[:8], jnp.float32) / 255
  images = (images - 0.5) / 0.5  # mean and deviation of the synthetic set

  def logits(model):
    return jax.jit(model.apply)({"params": params}, images)

  plain = logits(checkpoint.build_model(content))
  np.testing.assert_array_equal(logits(model), plain)
  layout, hypers = evaluate.evaluator(settings, model, None, content["data"])
  placed = layout.put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], params))
  few = Split(dataset.test.images[:8], dataset.test.labels[:8])
  (found,) = evaluate.values(layout, placed, hypers, [few], 8)
  expected = -log_softmax(np.asarray(plain, np.float64))[np.arange(8), few.labels]
  np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)

"""One step of training: what must not count in it."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import config, feed, train
from vit_jax.data import batches
from vit_jax.loop import Loop


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_its_number_only(broken):
  job = train.prepare(tiny.make())
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = job.steps.init(hyper)
  batch = {
    "image": job.data.train.images[:8],
    "label": job.data.train.labels[:8],
    **batches.rows((8,)),
  }
  if broken == "loss":
    state["params"]["head"]["bias"] += np.nan
  else:  # too long for float32; the loss is finite
    state["params"]["head"]["kernel"] += 1e22 * np.eye(16, 10)
  after, metrics = jax.jit(job.steps.train_step)(state, batch, hyper)
  known = [np.isfinite(metrics[n]) for n in ("loss", "gradient_norm")]
  assert known == [broken == "gradient", False]
  assert metrics["finite"] == 0 and after["step"] == 1
  for name in ("params", "opt_state"):
    jax.tree.map(np.testing.assert_array_equal, after[name], state[name])


def test_an_unreadable_image_counts_for_nothing(tmp_path):
  """A row of weight 0 changes neither loss nor gradient, whatever its pixels."""
  cfg = tiny.make(optim__name="sgd", train__steps_per_call=1)
  job = train.prepare(cfg)
  loop = Loop(job, tmp_path, tiny.Silent())
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = job.steps.init(hyper)
  source = feed.make(job, loop.layout, 0)
  index = source.examples(0, 0)
  batch = {
    "image": job.data.train.images[index].astype(np.float32),
    "label": job.data.train.labels[index],
    "row": np.arange(8, dtype=np.int32),
    "weight": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32),
  }
  _, metrics = job.steps.train_step(state, batch, hyper)
  broken = {**batch, "image": batch["image"].copy()}
  broken["image"][3] = np.nan
  _, other = job.steps.train_step(state, broken, hyper)
  seven = {name: np.delete(value, 3, 0) for name, value in batch.items()}
  _, expected = job.steps.train_step(state, seven, hyper)
  for found in (metrics, other):
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
  np.testing.assert_allclose(
    metrics["gradient_norm"], expected["gradient_norm"], rtol=1e-5
  )


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_an_unreadable_image_is_mixed_into_no_other(kind):
  cfg = tiny.make(augment__mixup=float(kind == "mixup"))
  cfg = config.override(cfg, {"augment.cutmix": float(kind == "cutmix")})
  job = train.prepare(cfg)
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = job.steps.init(hyper)
  batch = {
    "image": job.data.train.images[:8],
    "label": job.data.train.labels[:8],
    "row": np.arange(8, dtype=np.int32),
    "weight": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32),
  }
  other = {name: value.copy() for name, value in batch.items()}
  other["image"][3] = 255 - other["image"][3]
  other["label"][3] = (other["label"][3] + 1) % job.inputs.classes
  (_, one), (_, two) = (job.steps.train_step(state, b, hyper) for b in (batch, other))
  assert one["loss"] == two["loss"]
  assert one["gradient_norm"] == two["gradient_norm"]

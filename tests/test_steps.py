"""One step of training: what must not count in it."""

import jax
import numpy as np
import pytest
import tiny

from vit_jax import config, train
from vit_jax.data import batches


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(broken):
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
  assert metrics["finite"] == 0
  jax.tree.map(np.testing.assert_array_equal, after, state)


def begun(job):
  """Returns the traced settings and a first state whose head tells images apart: at the
  start it is 0, and every image has the same loss."""
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = job.steps.init(hyper)
  draw = np.random.default_rng(0).normal(size=(16, 10))
  state["params"]["head"]["kernel"] += draw.astype(np.float32)
  return hyper, state


def fourth_unreadable(job):
  return {
    "image": job.data.train.images[:8],
    "label": job.data.train.labels[:8],
    "row": np.arange(8, dtype=np.int32),
    "weight": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32),
  }


def test_an_unreadable_image_counts_for_nothing():
  """A row of weight 0 changes neither loss nor gradient."""
  job = train.prepare(tiny.make())
  hyper, state = begun(job)
  batch = fourth_unreadable(job)
  other = {**batch, "image": batch["image"].copy()}
  other["image"][3] = 255 - other["image"][3]
  seven = {name: np.delete(value, 3, 0) for name, value in batch.items()}
  counted = {**other, "weight": np.ones(8, np.float32)}
  step = jax.jit(job.steps.train_step)
  found, same, expected, unlike = (
    step(state, b, hyper)[1] for b in (batch, other, seven, counted)
  )
  for name in ("loss", "gradient_norm"):
    assert found[name] == same[name]
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    assert abs(unlike[name] - found[name]) > 1e-3  # with a weight it would count


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_an_unreadable_image_is_mixed_into_no_other(kind):
  cfg = tiny.make(augment__mixup=float(kind == "mixup"))
  cfg = config.override(cfg, {"augment.cutmix": float(kind == "cutmix")})
  job = train.prepare(cfg)
  hyper, state = begun(job)
  batch = fourth_unreadable(job)
  other = {name: value.copy() for name, value in batch.items()}
  other["image"][3] = 255 - other["image"][3]
  other["label"][3] = (other["label"][3] + 1) % job.inputs.classes
  (_, one), (_, two) = (job.steps.train_step(state, b, hyper) for b in (batch, other))
  assert one["loss"] == two["loss"]
  assert one["gradient_norm"] == two["gradient_norm"]

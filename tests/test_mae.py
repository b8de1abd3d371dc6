"""Masked autoencoder: the loss against NumPy, what is hidden, what is read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import config, losses, models, optim, steps
from vit_jax.config import ConfigError, Pair
from vit_jax.models import mae, patches

SMALL = {
  "model.patch": 4,
  "model.width": 16,
  "model.depth": 1,
  "model.heads": 2,
  "loss.name": "mae",
}


def made(changes=(), size=8, batch=3):
  """Returns model, random parameters, images and keys; compiles nothing."""
  c = config.override(config.Config(), SMALL | dict(changes))
  model = models.build(c, Pair(size, size), 10)
  draw = np.random.default_rng(0)
  images = draw.normal(size=(batch, size, size, 3)).astype(np.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  params = jax.tree.map(
    lambda x: draw.normal(scale=0.3, size=x.shape).astype(np.float32), shapes
  )
  return model, params, images, jax.random.split(jax.random.key(2), batch)


def test_loss_is_that_of_numpy_for_the_same_mask():
  model, params, images, keys = made({"model.patch": 2}, size=4)
  apply = jax.jit(lambda images: model.apply({"params": params}, images, keys=keys))
  order = np.asarray(model.apply({"params": params}, 3, keys, method="order"))
  seen = model.apply(
    {"params": params}, images, order[:, : model.visible], keys=keys, method="encode"
  )
  decoder = mae.Decoder(mae.decoder_config(model.config), model.geometry)
  guesses = decoder.apply({"params": params["decoder"]}, seen, order, 12)

  expected = []
  for image, guess, hidden in zip(images, guesses, order[:, model.visible :]):
    errors = []
    for place in hidden:
      row, column = divmod(place, 2)
      cell = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
      cell = cell.astype(np.float64).reshape(-1)
      cell = (cell - cell.mean()) / np.sqrt(cell.var() + 1e-6)
      errors.append(np.mean((np.asarray(guess[place], np.float64) - cell) ** 2))
    expected.append(np.mean(errors))
  np.testing.assert_allclose(apply(images), expected, rtol=1e-5)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"model.pool": "mean", "model.registers": 2, "model.positions": "rope2d"},
    {"model.pool": "map", "model.stride": 2, "model.positions": "sincos2d"},
    {"model.tokenizer": "conv", "model.pool": "mean", "model.scan_layers": True},
  ],
)
def test_encoder_sees_nothing_outside_the_visible_windows(changes):
  model, params, images, keys = made({"loss.mask_ratio": 0.9, **changes}, size=16)
  order = model.order(3, keys)
  visible = order[:, : model.visible]

  def total(images):
    seen = model.apply({"params": params}, images, visible, method="encode")
    return jnp.sum(jnp.sin(seen * jnp.arange(1.0, 17.0)[None, None]))

  gradient = np.abs(jax.jit(jax.grad(total))(images)).max(-1)
  g = model.geometry
  starts = [np.maximum(s, 0) for s in g.starts()]
  ends = [s + p for s, p in zip(g.starts(), g.patch)]
  inside = np.zeros(images.shape[:3], bool)
  for mask, places in zip(inside, np.asarray(visible)):
    for row, column in zip(*np.divmod(places, g.grid.width)):
      mask[starts[0][row] : ends[0][row], starts[1][column] : ends[1][column]] = True
  assert (gradient[~inside] == 0).all() and not inside.all()
  assert (gradient[inside] > 0).mean() > 0.9


def test_places_of_visible_patches_count():
  """The same tokens elsewhere give other features, with any kind of position."""
  for kind in ("learned", "rope2d"):
    model, params, images, _ = made({"model.positions": kind}, size=12)
    first, second = (
      jnp.broadcast_to(jnp.array(p), (3, 3)) for p in ((0, 1, 2), (0, 1, 5))
    )
    same = np.tile(images[:, :4, :4], (1, 3, 3, 1))
    a, b = (
      model.apply({"params": params}, same, places, method="encode")
      for places in (first, second)
    )
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.parametrize(
  ("ratio", "visible"), [(0.75, 9), (0.9, 4), (0.5, 18), (0.99, None), (0.0, None)]
)
def test_number_of_visible_patches(ratio, visible):
  changes = SMALL | {"loss.mask_ratio": ratio, "model.patch": 2}
  c = config.override(config.Config(), changes)
  if visible is None:
    with pytest.raises(ConfigError, match="loss.mask_ratio=.* of 36 patches"):
      models.build(c, Pair(12, 12), 10)
  else:
    assert models.build(c, Pair(12, 12), 10).visible == visible


def test_masks_are_each_examples_own():
  model, params, images, keys = made(size=16, batch=6)
  order = np.asarray(model.order(6, keys))
  assert (np.sort(order, 1) == np.arange(16)[None]).all()
  assert len({tuple(sorted(row[:4])) for row in order}) > 3
  apply = jax.jit(lambda i, k: model.apply({"params": params}, i, keys=k))
  whole = apply(images, keys)
  parts = np.concatenate([apply(images[i : i + 2], keys[i : i + 2]) for i in (0, 2, 4)])
  np.testing.assert_allclose(whole, parts, rtol=1e-5)


def test_masks_are_uniform():
  model, *_ = made(size=16)
  keys = jax.random.split(jax.random.key(5), 4000)
  visible = np.asarray(model.order(4000, keys))[:, : model.visible]
  shares = np.bincount(visible.reshape(-1), minlength=16) / 4000
  # Each place is visible in 1 of 4; 5 standard deviations of 4000 draws.
  np.testing.assert_allclose(shares, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 4000))


def test_one_value_a_patch_is_refused():
  c = config.override(config.Config(), SMALL | {"model.patch": 1})
  with pytest.raises(ConfigError, match="nothing to rebuild"):
    models.build(c, Pair(4, 4), 10).init(jax.random.key(0), jnp.zeros((1, 4, 4, 1)))


def test_encoder_is_a_vit_without_what_reads_it():
  c = config.override(config.Config(), SMALL | {"model.pool": "map"})
  image = jnp.zeros((1, 8, 8, 3))
  masked = models.build(c, Pair(8, 8), 10).init(jax.random.key(0), image)["params"]
  plain = config.override(c, {"loss.name": "softmax"})
  vit = models.build(plain, Pair(8, 8), 10).init(jax.random.key(0), image)["params"]
  assert set(masked) == {"encoder", "decoder"}
  assert set(vit) - set(masked["encoder"]) == {"head", "pool"}
  for name, part in masked["encoder"].items():
    assert jax.tree.map(jnp.shape, part) == jax.tree.map(jnp.shape, vit[name])


def _steps(changes):
  c = config.override(config.Config(), SMALL | changes)
  inputs = steps.Inputs((8, 8, 1), 10, (0.5,), (0.25,))
  model = models.build(c, Pair(8, 8), 10)
  optimizer = optim.make(c.optim, optim.Plan(30, 0, 3.0), c.model.depth)
  hyper = steps.hyper(c, 3.0, models.traceable(c.model))
  return steps.make(c, model, losses.make(c.loss), optimizer, inputs), hyper


def _batch(labels):
  y, x = np.mgrid[:8, :8]
  phase = np.linspace(0, 6, 16)[:, None, None]
  images = np.rint(127 + 100 * np.sin(0.7 * x + 0.4 * y + phase)).astype(np.uint8)
  return {
    "image": images[..., None],
    "label": labels,
    "row": np.arange(16, dtype=np.int32),
    "weight": np.ones(16, np.float32),
  }


def test_training_learns_and_reads_no_label():
  made, hyper = _steps({"model.patch": 2, "optim.lr": 3e-3, "augment.crop": 1})
  start = jax.jit(made.init)(hyper)
  step = jax.jit(made.train_step)
  labels = np.arange(16, dtype=np.int32) % 10
  ends = []
  for label in (labels, labels[::-1]):
    state, history = start, []
    for _ in range(30):
      state, metrics = step(state, _batch(label), hyper)
      history.append(float(metrics["loss"]))
    assert np.mean(history[-5:]) < 0.8 * np.mean(history[:5])
    ends.append((history, state["params"]))
  assert ends[0][0] == ends[1][0]
  jax.tree.map(np.testing.assert_array_equal, ends[0][1], ends[1][1])


def test_evaluation_is_without_dropout():
  noisy, hyper = _steps({"model.dropout": 0.5, "model.drop_path": 0.5})
  plain, quiet = _steps({})
  params = jax.jit(plain.init)(quiet)["params"]
  batch = _batch(np.zeros(16, np.int32))
  a = jax.jit(noisy.eval_step)(params, batch, hyper)["loss"]
  b = jax.jit(plain.eval_step)(params, batch, quiet)["loss"]
  np.testing.assert_allclose(a, b, rtol=1e-5)


def test_overlapping_targets_are_the_windows_pixels():
  model, _, images, _ = made({"model.stride": 2}, size=8)
  cells = np.asarray(patches.patchify(images, model.geometry))
  assert cells.shape == (3, 9, 48)
  np.testing.assert_array_equal(cells[1, 4].reshape(4, 4, 3), images[1, 2:6, 2:6])
  flat = mae.scaled(jnp.full((1, 2, 48), 3.0))
  assert np.abs(flat).max() < 1e-3


def test_mask_does_not_depend_on_dropout():
  """Noise has its own part of the key."""
  model, params, images, keys = made()
  with_noise = dataclasses.replace(model.config, dropout=0.3)
  other = model.clone(config=with_noise)
  np.testing.assert_array_equal(model.order(3, keys), other.order(3, keys))
  hyper = models.traceable(with_noise)
  a, b = (
    m.apply({"params": params}, images, keys=keys, hyper=hyper) for m in (model, other)
  )
  assert np.abs(a - b).max() > 1e-4

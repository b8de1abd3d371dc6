"""Masked autoencoder: the loss against NumPy, what is hidden, what is read."""

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
  decoder = mae.Decoder(mae.decoder_config(model.config), model.geometry)

  @jax.jit
  def parts(images):
    order = model.order(len(images), keys)
    visible = order[:, : model.visible]
    seen = model.apply({"params": params}, images, visible, keys=keys, method="encode")
    guesses = decoder.apply({"params": params["decoder"]}, seen, order, 12)
    return model.apply({"params": params}, images, keys=keys), order, guesses

  loss, order, guesses = (np.asarray(part) for part in parts(images))
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
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_decoder_puts_patches_back_in_their_places():
  """In whatever order they come."""
  model, params, _, keys = made({"model.registers": 1}, size=12)
  order = np.array(model.order(3, keys))
  visible = np.arange(model.visible)[::-1]
  other = np.concatenate([order[:, visible], order[:, len(visible) :]], axis=1)
  seen = np.random.default_rng(1).normal(size=(3, 2 + len(visible), 16))
  seen = seen.astype(np.float32)
  decoder = mae.Decoder(mae.decoder_config(model.config), model.geometry)
  apply = jax.jit(lambda *x: decoder.apply({"params": params["decoder"]}, *x, 48))
  guesses = apply(seen, order)
  turned = np.concatenate([seen[:, :2], seen[:, 2 + visible]], axis=1)
  np.testing.assert_allclose(apply(turned, other), guesses, rtol=1e-4, atol=1e-4)
  assert np.abs(apply(turned, order) - guesses).max() > 1e-2


@pytest.mark.parametrize(
  "changes",
  [
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


@pytest.mark.parametrize("kind", ["learned", "rope2d"])
def test_places_of_visible_patches_count(kind):
  """The same patch elsewhere gives other features, with any kind of position."""
  model, params, images, _ = made({"model.positions": kind}, size=12, batch=2)
  same = np.broadcast_to(images[:1], images.shape).copy()
  same[:, 4:8, 8:] = same[:, :4, 8:]  # places 2 and 5
  places = jnp.array([[0, 1, 2], [0, 1, 5]])
  encode = jax.jit(lambda *x: model.apply({"params": params}, *x, method="encode"))
  a, b = encode(same, places)
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
  """Whatever else is in the batch: the loss of an example is its own."""
  model, params, images, keys = made(size=16, batch=6)
  order = np.asarray(model.order(6, keys))
  assert (np.sort(order, 1) == np.arange(16)[None]).all()
  assert len({tuple(sorted(row[:4])) for row in order}) > 3
  apply = jax.jit(lambda i, k: model.apply({"params": params}, i, keys=k))
  others = np.array([5, 5, 0, 1, 2, 2])
  whole, mixed = apply(images, keys), apply(images[others], keys[others])
  np.testing.assert_allclose(mixed, np.asarray(whole)[others], rtol=1e-5)
  elsewhere = apply(images[others], keys)
  assert np.abs(elsewhere - np.asarray(whole)[others])[:5].min() > 1e-4


def test_masks_are_uniform():
  model, *_ = made(size=16)
  keys = jax.random.split(jax.random.key(5), 4000)
  visible = np.asarray(model.order(4000, keys))[:, : model.visible]
  shares = np.bincount(visible.reshape(-1), minlength=16) / 4000
  # Each place is visible in 1 of 4; 5 standard deviations of 4000 draws.
  np.testing.assert_allclose(shares, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 4000))


def test_one_value_a_patch_is_refused():
  c = config.override(config.Config(), SMALL | {"model.patch": 1})
  model = models.build(c, Pair(4, 4), 10)
  with pytest.raises(ConfigError, match="nothing to rebuild"):
    jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4, 4, 1)))


def test_encoder_is_a_vit_without_what_reads_it():
  _, masked, images, _ = made({"model.pool": "map"})
  _, vit, *_ = made({"model.pool": "map", "loss.name": "softmax"})
  assert set(masked) == {"encoder", "decoder"}
  assert set(vit) - set(masked["encoder"]) == {"head", "pool"}
  for name, part in masked["encoder"].items():
    assert jax.tree.map(np.shape, part) == jax.tree.map(np.shape, vit[name])


def test_decoder_takes_no_scale_of_a_member():
  """A traced `model.scale` is the encoder's; an evaluation that rebuilds the model with
  the member's settings must find the same decoder."""
  plain, params, images, keys = made({"model.scale": 0.5})
  other, *_ = made()

  def loss(model):
    return model.apply({"params": params}, images, keys=keys, hyper=hyper)

  hyper = {"scale": 0.5, "dropout": 0.0, "drop_path": 0.0}
  np.testing.assert_array_equal(loss(plain), loss(other))


def test_training_learns_and_reads_no_label():
  changes = {"model.patch": 2, "model.pool": "mean", "optim.name": "sgd"}
  c = config.override(config.Config(), SMALL | changes)
  inputs = steps.Inputs((8, 8, 1), 10, (0.5,), (0.25,))
  model = models.build(c, Pair(8, 8), 10)
  optimizer = optim.make(c.optim, optim.Plan(30, 0, 0.0), c.model.depth)
  hyper = steps.hyper(c, 0.0, models.traceable(c.model))
  hyper["optim"]["lr"] = np.float32(0.1)
  made = steps.make(c, model, losses.make(c.loss), optimizer, inputs)
  start, step = jax.jit(made.init)(hyper), jax.jit(made.train_step)
  y, x = np.mgrid[:8, :8]
  waves = np.sin(0.7 * x + 0.4 * y + np.linspace(0, 6, 16)[:, None, None])
  batch = {
    "image": np.rint(127 + 100 * waves).astype(np.uint8)[..., None],
    "row": np.arange(16, dtype=np.int32),
    "weight": np.ones(16, np.float32),
  }
  ends = []
  for label in (np.arange(16) % 10, np.arange(16)[::-1] % 10):
    state, history = start, []
    for _ in range(30):
      state, metrics = step(state, {**batch, "label": label.astype(np.int32)}, hyper)
      history.append(float(metrics["loss"]))
    ends.append((history, state["params"]))
  assert np.mean(history[-5:]) < 0.8 * np.mean(history[:5])
  assert ends[0][0] == ends[1][0]
  jax.tree.map(np.testing.assert_array_equal, ends[0][1], ends[1][1])


def test_evaluation_hides_the_same_patches_and_adds_no_noise():
  calls = []

  def apply(images, keys, hyper):
    calls.append((jax.random.key_data(keys), hyper))
    return images

  hyper = {"model": {"scale": 2.0, "dropout": 0.5, "drop_path": 0.5}}
  objective = losses.MaskedAutoencoder()
  for rows in ([0, 1, 2], [2, 3, 4]):
    batch = {"image": jnp.zeros(3), "row": jnp.array(rows)}
    objective.evaluate(apply, batch, hyper)
  (first, quiet), (second, _) = calls
  assert quiet == {"scale": 2.0, "dropout": 0.0, "drop_path": 0.0}
  np.testing.assert_array_equal(first[2], second[0])
  assert not np.array_equal(first[1], second[1])


def test_overlapping_targets_are_the_windows_pixels():
  model, _, images, _ = made({"model.stride": 2}, size=8)
  cells = np.asarray(patches.patchify(images, model.geometry))
  assert cells.shape == (3, 9, 48)
  np.testing.assert_array_equal(cells[1, 4].reshape(4, 4, 3), images[1, 2:6, 2:6])
  flat = mae.scaled(jnp.full((1, 2, 48), 3.0))
  assert np.abs(flat).max() < 1e-3

"""The model against NumPy in float64, and what must hold of its parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from close import assert_trees_close, drawn, quick_jit

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.config import ConfigError, Pair
from vit_jax.models import noise, positions, vit

SMALL = dict(patch=4, width=16, depth=2, heads=2, mlp_ratio=2.0)
CLASSES = 3


def build(image=(8, 8), **settings):
  changes = {f"model.{name}": value for name, value in (SMALL | settings).items()}
  config = config_lib.override(config_lib.Config(), changes)
  return models.build(config, Pair(*image), CLASSES)


def pixels(model, batch=2):
  return jnp.asarray(drawn(batch, *model.geometry.image, 3, seed=9))


def perturbed(model, seed=0):
  """Returns random parameters, none of them 0 or 1 as at the start."""
  images = jax.ShapeDtypeStruct((1, *model.geometry.image, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = path[-1].key
    inputs = leaf.size // leaf.shape[-1]
    if path[-2:] and name == "kernel" and path[-2].key in ("query", "key", "value"):
      inputs = leaf.shape[0]
    sizes = {"kernel": inputs**-0.5, "scale": 0.3, "bias": 0.3}
    value = rng.normal(size=leaf.shape) * sizes.get(name, 0.5)
    return (value + (name == "scale")).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def keys_of(batch, seed=0):
  return jax.random.split(jax.random.key(seed), batch)


def apply(model, params, inputs, *, keys=None, hyper=None, **static):
  """Runs the model, compiled; `static` are arguments of Flax and method names."""

  def run(params, inputs, keys, hyper):
    return model.apply({"params": params}, inputs, **static, **noisy(keys, hyper))

  return quick_jit(run)(params, jnp.asarray(inputs), keys, hyper)


def noisy(keys, hyper):
  given = {"keys": keys, "hyper": hyper}
  return {name: value for name, value in given.items() if value is not None}


@pytest.mark.parametrize(
  "settings",
  [
    dict(),
    dict(positions="sincos1d", pool="mean", registers=2),
    dict(positions="sincos2d", pool="map", layer_scale=0.1),
    dict(positions="rope2d", pool="cls", registers=1, qk_norm=True),
    dict(positions="rope2d", pool="mean", heads=1, attention="fused"),
    dict(positions="none", pool="map", mlp="swiglu", mlp_ratio=8 / 3),
    dict(positions="learned", pool="mean", registers=3, mlp="gelu_erf", scale="none"),
    dict(positions="learned", pool="map", heads=1, scale=0.37, qk_norm=True),
    dict(positions="none", pool="cls", mlp="swiglu", scale=0.0, layer_scale=1.0),
    dict(stride=2, pad=1, pad_mode="reflect", positions="sincos2d", heads=4),
    dict(patch=(4, 2), stride=(3, 2), pad="same", image=(9, 4), positions="rope2d"),
    dict(scan_layers=True, remat=True, registers=1, attention="fused", scale="none"),
  ],
)
def test_logits_in_float64(settings):
  model = build(**settings)
  params, images = perturbed(model), pixels(model)
  wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
  expected = reference.logits(wide, images, model.config)
  assert np.abs(expected).max() > 0.1
  np.testing.assert_allclose(apply(model, params, images), expected, atol=1e-5)
  # Images are not mixed up.
  assert np.abs(expected[0] - expected[1]).max() > 1e-3


def value_and_gradients(model, params, images, keys, hyper=None):
  def loss(params):
    out = model.apply({"params": params}, images, keys=keys, hyper=hyper)
    return jnp.sin(out).sum(), out

  (_, out), gradients = quick_jit(jax.value_and_grad(loss, has_aux=True))(params)
  return jax.device_get((out, gradients))


@functools.cache
def noisy_unrolled():
  """A model in training, each layer traced on its own, no recomputation."""
  settings = dict(dropout=0.3, drop_path=0.5, layer_scale=0.5, positions="rope2d")
  model = build(**settings)
  params, images = perturbed(model), pixels(model, 4)
  found = value_and_gradients(model, params, images, keys_of(4))
  return settings, params, images, found


@pytest.mark.parametrize(
  "settings", [dict(scan_layers=True), dict(remat=True), dict(scan_layers=1, remat=1)]
)
def test_scan_and_remat_change_nothing(settings):
  base, params, images, found = noisy_unrolled()
  settings = {name: bool(value) for name, value in settings.items()}
  model = build(**base, **settings)
  again = value_and_gradients(model, params, images, keys_of(4))
  assert_trees_close(again, found, 1e-6)


def test_noise_is_on_only_with_keys():
  base, params, images, (noisy, _) = noisy_unrolled()
  model = build(**base)
  calm = build(positions="rope2d", layer_scale=0.5)
  still = np.asarray(apply(model, params, images))
  np.testing.assert_array_equal(still, apply(calm, params, images))
  assert np.abs(noisy - still).max() > 1e-2


def test_a_traced_scale_is_the_configured_one():
  model, plain = build(scale=0.37), build()
  params, images = perturbed(model), pixels(model)
  traced = {"scale": jnp.float32(0.37), "dropout": 0.0, "drop_path": 0.0}
  np.testing.assert_allclose(
    apply(plain, params, images, hyper=traced), apply(model, params, images), atol=1e-6
  )
  assert models.traceable(plain.config)["scale"] == 8**-0.5
  assert models.traceable(build(scale="none").config)["scale"] == 1


def equations(jaxpr, name):
  """Yields the operations of this name, those of inner functions too."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == name:
      yield equation
    for value in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("settings", [dict(), dict(scan_layers=True, mlp="swiglu")])
def test_a_half_type_reaches_every_product(dtype, settings):
  """Of a training step: products of blocks and tokenizer in half, norms, softmax and
  head in float32, parameters and their gradients too."""
  depth = 3
  model = build(depth=depth, dtype=dtype, dropout=0.1, qk_norm=True, **settings)
  params, images = perturbed(model), pixels(model)

  def forward(params):
    return model.apply({"params": params}, images, keys=keys_of(2))

  jaxpr = jax.make_jaxpr(forward)(params).jaxpr
  products = list(equations(jaxpr, "dot_general"))
  types = [tuple(str(v.aval.dtype) for v in e.invars) for e in products]
  blocks = 1 if model.config.scan_layers else depth
  per_block = 8 + (model.config.mlp == "swiglu")
  # Tokenizer and blocks; the head, last, is the only one in float32.
  assert types == [(dtype, dtype)] * (1 + blocks * per_block) + [("float32",) * 2]
  for operation, least in (("exp", blocks), ("rsqrt", 4 * blocks + 1)):
    found = [str(e.invars[0].aval.dtype) for e in equations(jaxpr, operation)]
    assert len(found) >= least
    assert set(found) == {"float32"}
  gradients = jax.eval_shape(jax.grad(lambda p: forward(p).sum()), params)
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"float32"}
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {"float32"}
  assert jax.eval_shape(forward, params).dtype == jnp.float32


def test_bfloat16_is_near_float32():
  model, half = build(), build(dtype="bfloat16")
  params, images = perturbed(model), pixels(model)
  full = apply(model, params, images)
  np.testing.assert_allclose(apply(half, params, images), full, atol=0.1)


def test_weights_are_sown():
  """In float32, before dropout, rows that sum to 1; of each layer, whatever the way
  layers are run; and nothing is kept unless asked for."""
  model = build(
    registers=1,
    pool="map",
    dropout=0.5,
    drop_path=0.5,
    dtype="bfloat16",
    attention="fused",
    scan_layers=True,
  )
  params, images = perturbed(model), pixels(model)
  _, found = apply(model, params, images, keys=keys_of(2), mutable=["intermediates"])
  found = found["intermediates"]
  assert set(found) == {"block_0", "block_1", "pool"}
  for i in range(2):
    (weights,) = found[f"block_{i}"]["attention"]["weights"]
    assert (weights.shape, weights.dtype) == ((2, 2, 5, 5), jnp.float32)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
  assert found["pool"]["weights"][0].shape == (2, 2, 1, 4)
  assert not isinstance(apply(model, params, images), tuple)


def block_outputs(model, params, images, **kwargs):
  """Returns the tokens after each block, by name."""
  _, found = apply(
    model,
    params,
    images,
    mutable=["intermediates"],
    capture_intermediates=lambda module, _: isinstance(module, vit.Block),
    **kwargs,
  )
  return {
    name: np.asarray(part["__call__"][0])
    for name, part in found["intermediates"].items()
    if name.startswith("block_")
  }


@pytest.mark.parametrize("place", ["learned", "sincos2d"])
def test_registers_have_no_position(place):
  """With blocks that add nothing: the tokens as they enter. The class token has the
  first row of a learned table, and nothing of a fixed one."""
  model = build(registers=2, positions=place, depth=1)
  params = perturbed(model)
  params["block_0"] = jax.tree.map(np.zeros_like, params["block_0"])
  params["registers"] = np.full_like(params["registers"], 100)
  images = pixels(model)
  x = block_outputs(model, params, images)["block_0"]
  np.testing.assert_array_equal(x[:, 1:3], 100)
  tokens, _ = reference.patch_tokens(params["tokenizer"], images, model.config)
  if place == "learned":
    first, others = params["positions"][:1], params["positions"][1:]
  else:
    first, others = 0, positions.sincos2d(model.geometry.grid, 16)
  np.testing.assert_array_equal(x[:, 0], np.tile(params["cls"] + first, (2, 1)))
  np.testing.assert_allclose(x[:, 3:], tokens + others, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_registers_are_not_pooled(pool):
  model = build(pool=pool, registers=2)
  params = perturbed(model)
  x = drawn(2, model.prefix + 4, 16)

  def pooled(x):
    return np.asarray(apply(model, params, x, method="pooled"))

  before = pooled(x)
  others = x.copy()
  others[:, model.prefix - 2 : model.prefix] = 1e3
  np.testing.assert_array_equal(pooled(others), before)
  if pool != "cls":
    others[:, -1] += 1
    assert np.abs(pooled(others) - before).max() > 1e-3
  if pool == "mean":
    np.testing.assert_allclose(before, x[:, 2:].mean(1), atol=1e-6)


def test_drop_path_skips_whole_examples_more_often_with_depth():
  """Shares 0, 1/4, 1/2 in three blocks with drop_path 1/2; those that stay are scaled
  up so that the mean is the undisturbed branch."""
  model = build(image=(4, 4), depth=3, drop_path=0.5, width=8, pool="mean")
  params = perturbed(model)
  for i in range(3):  # attention alone
    params[f"block_{i}"]["mlp"]["down"] = jax.tree.map(
      np.zeros_like, params[f"block_{i}"]["mlp"]["down"]
    )
  batch = 400
  images = np.repeat(pixels(model, 1), batch, 0)
  noisy = block_outputs(model, params, images, keys=keys_of(batch))
  calm = block_outputs(model, params, images[:1])
  first = np.repeat(calm["block_0"], batch, 0)
  np.testing.assert_allclose(noisy["block_0"], first, atol=1e-5)
  steps = [noisy[f"block_{i + 1}"] - noisy[f"block_{i}"] for i in range(2)]
  for step, share in zip(steps, (0.25, 0.5)):
    skipped = (step == 0).all(axis=(1, 2))
    assert ((step == 0).any(axis=(1, 2)) == skipped).all()
    # 400 draws: a standard deviation of at most 0.025.
    assert abs(skipped.mean() - share) < 0.1
  kept = steps[0][~(steps[0] == 0).all(axis=(1, 2))]
  branch = calm["block_1"] - calm["block_0"]
  np.testing.assert_allclose(kept, np.repeat(branch, len(kept), 0) / 0.75, atol=1e-5)
  # What one block skips does not decide what the next skips.
  skipped = [(step == 0).all(axis=(1, 2)) for step in steps]
  assert abs((skipped[0] & skipped[1]).mean() - 0.125) < 0.08


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_dropout_keeps_the_mean(rate):
  ones = jnp.ones((64, 10, 20))
  found = noise.dropout(ones, noise.Noise(keys_of(64), jnp.float32(rate), 0.0))
  kept = np.asarray(found) != 0
  np.testing.assert_allclose(np.asarray(found)[kept], 1 / (1 - rate), rtol=1e-6)
  # 12,800 draws.
  assert abs(kept.mean() - (1 - rate)) < 0.02
  masks = kept.reshape(64, -1)
  if rate:
    assert len(np.unique(masks, axis=0)) == 64


@pytest.mark.parametrize("function", [noise.dropout, noise.drop_path])
def test_noise_of_an_example_is_its_own(function):
  """Neither its place in the batch nor the others change what is drawn for it."""
  x, keys = jnp.asarray(drawn(6, 4, 8)), keys_of(6)

  @quick_jit
  def both(order):
    whole = function(x, noise.Noise(keys, 0.5, 0.5))[order]
    return whole, function(x[order], noise.Noise(keys[order], 0.5, 0.5))

  np.testing.assert_array_equal(*both(jnp.array([4, 1, 5])))


def test_parts_of_the_noise_differ():
  start = noise.Noise(keys_of(8), 0.5, 0.5)
  ones = jnp.ones((8, 50))
  masks = [np.asarray(noise.dropout(ones, start.of(i))) for i in range(3)]
  masks.append(np.asarray(noise.dropout(ones, start.of(0).of(0))))
  for i, one in enumerate(masks):
    for two in masks[:i]:
      assert 0.3 < (one == two).mean() < 0.7


@pytest.fixture(scope="module")
def fresh():
  """The first parameters of a small model with every part."""
  model = build(depth=3, registers=2, layer_scale=0.1, width=32)
  images = jnp.zeros((1, 8, 8, 3))
  return jax.device_get(quick_jit(model.init)(jax.random.key(0), images)["params"])


def test_layers_start_apart(fresh):
  kernels = {
    path: leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(fresh)
    if path[-1].key == "kernel" and path[0].key != "head"
  }
  assert len(kernels) == 3 * 6 + 1
  flat = [leaf.ravel()[:64] for leaf in kernels.values()]
  for i, one in enumerate(flat):
    for two in flat[:i]:
      assert np.abs(one - two).max() > 1e-3


def test_start_values(fresh):
  assert not fresh["cls"].any()
  assert not fresh["head"]["kernel"].any()
  np.testing.assert_allclose(fresh["positions"].std(), 0.02, rtol=0.2)
  np.testing.assert_allclose(fresh["registers"].std(), 0.02, rtol=0.3)
  block = fresh["block_1"]
  np.testing.assert_array_equal(block["scale_mlp"], np.float32(0.1))
  np.testing.assert_array_equal(block["norm_mlp"]["scale"], 1)
  # Xavier of the flat matrices: uniform within sqrt(6 / (inputs + outputs)).
  for kernel, inputs, outputs in (
    (block["attention"]["query"]["kernel"], 32, 32),
    (block["attention"]["out"]["kernel"], 32, 32),
    (block["mlp"]["up"]["kernel"], 32, 64),
  ):
    limit = np.sqrt(6 / (inputs + outputs))
    assert 0.9 * limit < np.abs(kernel).max() <= limit
    np.testing.assert_allclose(kernel.std(), limit / np.sqrt(3), rtol=0.1)


def test_the_tree_is_the_same_with_scan(fresh):
  model = build(depth=3, registers=2, layer_scale=0.1, width=32, scan_layers=True)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
  assert jax.tree.map(jnp.shape, shapes["params"]) == jax.tree.map(jnp.shape, fresh)


def test_some_of_the_tokens_know_their_places():
  """Rotary angles follow the token, not its row: in another order, the same tokens."""
  model = build(positions="rope2d", registers=1)
  params = perturbed(model)
  tokens = jnp.asarray(drawn(2, 4, 16))

  @quick_jit
  def encode(tokens, places=None):
    variables = {"params": params}
    return model.apply(variables, tokens, places=places, method="encode")

  whole = encode(tokens)
  order = np.array([[2, 0, 3, 1], [3, 1, 0, 2]])
  rows = np.arange(2)[:, None]
  mixed = encode(tokens[rows, order], order)
  np.testing.assert_allclose(mixed[:, 2:], whole[:, 2:][rows, order], atol=1e-5)
  np.testing.assert_allclose(mixed[:, :2], whole[:, :2], atol=1e-5)
  assert np.abs(encode(tokens[rows, order]) - mixed).max() > 1e-3


@pytest.mark.parametrize(
  "settings",
  [
    dict(positions="sincos2d", width=18, heads=1),
    dict(positions="sincos1d", width=15, heads=1),
    dict(positions="rope2d", width=12, heads=2),
  ],
)
def test_positions_that_do_not_fit_are_refused(settings):
  with pytest.raises(ConfigError, match=f"{settings['positions']}.*divisible"):
    build(**settings)

"""Geometry against brute force, tokenizers against NumPy, convolution and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.config import ConfigError, Pair
from vit_jax.models import patches

# image, patch, stride, pad, pad_mode: every one is a grid that fits.
LAYOUTS = [
  ((8, 8), (4, 4), None, 0, "zero"),
  ((8, 12), (4, 3), (4, 3), 0, "zero"),
  ((8, 8), (4, 4), (2, 2), 0, "zero"),
  ((8, 8), (4, 4), (2, 2), 1, "edge"),
  ((8, 8), (8, 8), (4, 4), 2, "reflect"),
  ((10, 7), (4, 3), (3, 2), (0, 1), "zero"),
  ((9, 6), (4, 3), (3, 2), "same", "reflect"),
  ((8, 8), (4, 4), (1, 1), "same", "zero"),
  ((8, 8), (4, 4), None, 2, "edge"),
  ((5, 1), (1, 1), None, 0, "zero"),
  # One row and column of padding is left over.
  ((9, 9), (4, 4), (3, 3), 1, "zero"),
]


# Compiling is what takes time here: without the optimizations of machine code, half.
quick_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def model_of(patch, stride=None, pad=0, pad_mode="zero", tokenizer="linear"):
  changes = {
    "model.patch": patch,
    "model.stride": stride,
    "model.pad": pad,
    "model.pad_mode": pad_mode,
    "model.tokenizer": tokenizer,
  }
  return config_lib.override(config_lib.Config(), changes).model


def lay(image, patch, stride=None, pad=0, pad_mode="zero", tokenizer="linear"):
  model = model_of(patch, stride, pad, pad_mode, tokenizer)
  return patches.geometry(model, Pair(*image))


def drawn(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def padding_of(patch, stride, pad):
  """(top, bottom), (left, right) from the words of the configuration."""
  stride = stride or patch
  if pad == "same":
    totals = [p - s for p, s in zip(patch, stride)]
    # An odd pixel goes to the bottom and to the right.
    return [(t // 2, (t + 1) // 2) for t in totals]
  pair = (pad, pad) if isinstance(pad, int) else pad
  return [(p, p) for p in pair]


def windows(image, patch, stride, pad):
  """Every window that fits, by trying all places: [(row pixels, column pixels)]."""
  stride = stride or patch
  axes = []
  for size, side, step, (low, high) in zip(
    image, patch, stride, padding_of(patch, stride, pad)
  ):
    starts = [s for s in range(-low, size + high) if (s + low) % step == 0]
    axes.append([range(s, s + side) for s in starts if s + side <= size + high])
  return axes


@pytest.mark.parametrize("image, patch, stride, pad, mode", LAYOUTS)
def test_geometry_by_counting(image, patch, stride, pad, mode):
  geometry = lay(image, patch, stride, pad, mode)
  rows, columns = windows(image, patch, stride, pad)
  assert tuple(geometry.grid) == (len(rows), len(columns))
  assert geometry.tokens == len(rows) * len(columns)
  cells = [(r, c) for r in rows for c in columns]
  centres = [(np.mean(r), np.mean(c)) for r, c in cells]
  np.testing.assert_allclose(geometry.centres(), centres)
  counts = np.zeros(image, int)
  for r, c in cells:
    for y in r:
      for x in c:
        if 0 <= y < image[0] and 0 <= x < image[1]:
          counts[y, x] += 1
  np.testing.assert_array_equal(geometry.coverage(), counts)
  assert counts.min() > 0
  starts = geometry.starts()
  assert [s.tolist() for s in starts] == [[r[0] for r in rows], [c[0] for c in columns]]


def test_centres_in_pixels():
  """S g + (P - 1) / 2 - pad: 8x8 patches, stride 4, pad 2 sit where 4x4 ones do."""
  plain, wide = lay((32, 32), 4), lay((32, 32), 8, 4, 2)
  np.testing.assert_array_equal(plain.centres(), wide.centres())
  assert plain.centres()[:2].tolist() == [[1.5, 1.5], [1.5, 5.5]]


def test_corners_are_seen_once_and_the_middle_most():
  counts = lay((32, 32), 4, 2).coverage()
  assert (counts[0, 0], counts[0, 2], counts[16, 16]) == (1, 2, 4)
  assert (counts == 1).sum() == 4 * 4  # the four 2x2 corners


@pytest.mark.parametrize(
  "size, patch, stride, unseen",
  [
    (224, 16, 12, 4),
    (224, 16, 10, 8),
    (32, 4, 3, 1),
    (30, 4, None, 2),
    (3, 4, None, 3),
  ],
)
def test_unseen_pixels_are_refused_with_sizes_that_work(size, patch, stride, unseen):
  with pytest.raises(ConfigError) as error:
    lay((size, size), patch, stride)
  message = str(error.value)
  assert f"leaves {unseen} pixels unseen" in message
  offered = re.search(r"try a size of ([0-9 or]+)", message)[1]
  near = [int(n) for n in offered.split(" or ")]
  for works in near:
    geometry = lay((works, works), patch, stride)
    assert geometry.coverage().min() > 0
  # None nearer works.
  distance = min(abs(n - size) for n in near)
  for other in range(size - distance + 1, size + distance):
    with pytest.raises(ConfigError):
      lay((other, other), patch, stride)


def test_a_hint_at_same_padding_works():
  with pytest.raises(ConfigError, match='model.pad="same"'):
    lay((30, 30), 7, 5)
  assert tuple(lay((30, 30), 7, 5, "same").grid) == (6, 6)


def test_what_fits_is_not_refused():
  assert tuple(lay((224, 224), 16, 8).grid) == (27, 27)


@pytest.mark.parametrize(
  "image, patch, stride, pad, mode, words",
  [
    ((8, 8), 4, 5, 0, "zero", "unseen"),
    ((8, 8), 4, (2, 6), 0, "zero", "unseen"),
    ((8, 8), 4, 0, 0, "zero", "positive"),
    ((8, 8), 4, -2, 0, "zero", "positive"),
    ((8, 8), 0, None, 0, "zero", "positive"),
    ((8, 0), 4, None, 0, "zero", "positive"),
    ((8, 8), 4, 2, -1, "zero", "from 0 to 3"),
    ((8, 8), 4, None, 4, "zero", "padding only"),
    ((3, 3), 4, 1, 3, "reflect", "edge"),
  ],
)
def test_refusals(image, patch, stride, pad, mode, words):
  with pytest.raises(ConfigError, match=words) as error:
    lay(image, patch, stride, pad, mode)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokenizer", ["conv", "hmlp"])
@pytest.mark.parametrize(
  "image, changes, words",
  [
    ((8, 8), dict(patch=4, stride=2), "stride"),
    ((8, 8), dict(patch=(4, 2)), "square"),
    ((9, 9), dict(patch=3), "2, 4, 8"),
    ((8, 8), dict(patch=1), "2, 4, 8"),
    ((8, 8), dict(patch=4, pad=1), "pad"),
    ((8, 10), dict(patch=4), "width 10 .* try 8 or 12"),
  ],
)
def test_refusals_of_stems(tokenizer, image, changes, words):
  with pytest.raises(ConfigError, match=words):
    lay(image, **changes, tokenizer=tokenizer)


@pytest.mark.parametrize("image, patch, stride, pad, mode", LAYOUTS)
def test_patches_are_pixels_of_the_padded_image(image, patch, stride, pad, mode):
  """Every value of every patch, looked up in what `numpy.pad` makes."""
  geometry = lay(image, patch, stride, pad, mode)
  images = drawn(2, *image, 3)
  found = np.asarray(
    quick_jit(patches.patchify, static_argnums=1)(jnp.asarray(images), geometry)
  )
  pads = padding_of(patch, stride, pad)
  numpy_mode = {"zero": "constant", "edge": "edge", "reflect": "reflect"}[mode]
  padded = np.pad(images, [(0, 0), *pads, (0, 0)], mode=numpy_mode)
  rows, columns = windows(image, patch, stride, pad)
  (top, _), (left, _) = pads
  expected = [
    [
      padded[b, r[0] + top : r[-1] + top + 1, c[0] + left : c[-1] + left + 1].ravel()
      for r in rows
      for c in columns
    ]
    for b in range(2)
  ]
  np.testing.assert_array_equal(found, np.array(expected))


def linear(geometry, images, kernel, bias):
  module = patches.LinearTokenizer(geometry, kernel.shape[-1])
  variables = {"params": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}}
  return np.asarray(quick_jit(module.apply)(variables, jnp.asarray(images)))


@pytest.mark.parametrize("image, patch, stride, pad, mode", LAYOUTS)
def test_linear_tokenizer(image, patch, stride, pad, mode):
  """Against NumPy in float64, and against XLA's convolution."""
  geometry = lay(image, patch, stride, pad, mode)
  images, kernel = drawn(2, *image, 3), drawn(*patch, 3, 5, seed=1)
  kernel, bias = kernel / np.sqrt(kernel[..., 0].size), drawn(5, seed=2)
  found = linear(geometry, images, kernel, bias)
  model = model_of(patch, stride, pad, mode)
  params = {"kernel": kernel.astype(np.float64), "bias": bias.astype(np.float64)}
  expected, _ = reference.patch_tokens(params, images.astype(np.float64), model)
  np.testing.assert_allclose(found, expected, atol=2e-6)
  padded = np.pad(
    images, [(0, 0), *geometry.pads, (0, 0)], mode=patches.PAD_MODES[mode]
  )
  convolved = patches.convolve(
    jnp.asarray(padded), jnp.asarray(kernel), geometry.stride
  )
  convolved = np.asarray(convolved).reshape(found.shape)
  np.testing.assert_allclose(found, convolved + bias, atol=2e-6)


def test_a_stride_equal_to_the_patch_is_the_plain_model():
  plain, explicit = lay((8, 8), 4), lay((8, 8), 4, 4)
  assert plain == explicit
  assert not explicit.overlaps
  images, kernel, bias = drawn(2, 8, 8, 3), drawn(4, 4, 3, 5, seed=1), drawn(5, seed=2)
  one, two = (linear(g, images, kernel, bias) for g in (plain, explicit))
  np.testing.assert_array_equal(one, two)


def test_a_wide_kernel_masked_to_its_middle_is_the_plain_model():
  """Arm A1' of the overlap study: 8x8 windows at stride 4, pad 2, of which only the
  central 4x4 weights are not 0, are 4x4 patches."""
  images, small, bias = drawn(2, 32, 32, 3), drawn(4, 4, 3, 6, seed=1), drawn(6, seed=2)
  wide = np.zeros((8, 8, 3, 6), np.float32)
  wide[2:6, 2:6] = small
  plain, overlapping = lay((32, 32), 4), lay((32, 32), 8, 4, 2)
  assert plain.grid == overlapping.grid
  one = linear(plain, images, small, bias)
  two = linear(overlapping, images, wide, bias)
  scale = np.abs(one).max()
  np.testing.assert_allclose(one / scale, two / scale, atol=1e-6)
  # Convolution adds in the same order in both where all numbers are small integers.
  images, small, wide = (np.round(4 * x) for x in (images, small, wide))
  by_convolution = [
    np.asarray(
      patches.convolve(patches.pad(jnp.asarray(images), g), jnp.asarray(k), g.stride)
    )
    for g, k in ((plain, small), (overlapping, wide))
  ]
  np.testing.assert_array_equal(*by_convolution)


@pytest.mark.parametrize("pixel, token", [((3, 3), 0), ((4, 4), 9), ((3, 4), 1)])
def test_one_pixel_changes_one_token(pixel, token):
  """On a 32x32 image of 8x8 patches: pixel (3, 3) is of token 0, (4, 4) of row 1,
  column 1."""
  geometry = lay((32, 32), 4)
  kernel, bias = drawn(4, 4, 1, 5), drawn(5, seed=1)
  image = np.zeros((1, 32, 32, 1), np.float32)
  dark = linear(geometry, image, kernel, bias)
  image[0, *pixel, 0] = 1
  changed = (linear(geometry, image, kernel, bias) != dark).any(axis=-1)[0]
  assert np.flatnonzero(changed).tolist() == [token]


def test_the_zero_padding_is_not_seen_by_the_inner_tokens():
  """Padding modes differ at the border and nowhere else."""
  images, kernel, bias = drawn(1, 16, 16, 1), drawn(8, 8, 1, 4, seed=1), np.zeros(4)
  zero, edge = (
    linear(lay((16, 16), 8, 4, 2, mode), images, kernel, bias.astype(np.float32))
    for mode in ("zero", "edge")
  )
  same = (zero == edge).all(axis=-1).reshape(4, 4)
  border = np.ones((4, 4), bool)
  border[1:3, 1:3] = False
  np.testing.assert_array_equal(same, ~border)


def test_conv_windows_are_a_convolution():
  """3x3, stride 2, one row of zeros above and one column on the left."""
  images, kernel = drawn(2, 8, 6, 3), drawn(3, 3, 3, 5, seed=1)
  found = patches.windows_3x3(jnp.asarray(images)) @ kernel.reshape(27, 5)
  expected = patches.convolve(
    jnp.asarray(images), jnp.asarray(kernel), (2, 2), ((1, 0), (1, 0))
  )
  np.testing.assert_allclose(found, expected, atol=1e-5)


def stem(tokenizer, image, patch, width=8):
  """Returns images -> tokens of a stem with random parameters, and its geometry."""
  geometry = lay(image, patch, tokenizer=tokenizer)
  module = patches.TOKENIZERS[tokenizer](geometry, width)
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *image, 2)))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes
  )
  return functools.partial(module.apply, params), geometry, params["params"]


@pytest.mark.parametrize("tokenizer", ["conv", "hmlp"])
def test_a_stem_sees_the_window_that_the_geometry_says(tokenizer):
  """By gradient: which pixels each token depends on."""
  image, patch = (16, 8), 4
  tokens_of, geometry, _ = stem(tokenizer, image, patch)
  images = jnp.asarray(drawn(1, *image, 2))
  # One number per token: a random mix of its channels, so that nothing cancels.
  mix = jnp.asarray(drawn(8, seed=3))
  jacobian = quick_jit(jax.jacrev(lambda x: tokens_of(x)[0] @ mix))(images)
  seen = (np.abs(np.asarray(jacobian)).max(axis=(1, -1)) > 0).reshape(-1, *image)
  assert len(seen) == geometry.tokens == 8
  starts = [(y, x) for y in geometry.starts()[0] for x in geometry.starts()[1]]
  for sees, (y, x) in zip(seen, starts):
    expected = np.zeros(image, bool)
    expected[
      max(y, 0) : y + geometry.patch.height, max(x, 0) : x + geometry.patch.width
    ] = True
    np.testing.assert_array_equal(sees, expected)
  np.testing.assert_array_equal(geometry.coverage(), seen.sum(axis=0))
  assert (geometry.coverage().max() > 1) == (tokenizer == "conv")


@pytest.mark.parametrize("tokenizer", ["conv", "hmlp"])
@pytest.mark.parametrize("patch", [2, 4])
def test_stems_in_float64(tokenizer, patch):
  """Against NumPy, from the published description of the stems."""
  tokens_of, _, params = stem(tokenizer, (8, 8), patch)
  images = drawn(2, 8, 8, 2)
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

  def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

  def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  x = images.astype(np.float64)
  steps = patch.bit_length() - 1
  for i in range(steps):
    half = x.shape[1] // 2
    if tokenizer == "conv":
      padded = np.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
      side, name = 3, f"conv_{i}"
    else:
      padded, side, name = x, 2, f"dense_{i}"
    y = np.stack(
      [
        np.stack(
          [
            padded[:, 2 * r : 2 * r + side, 2 * c : 2 * c + side].reshape(len(x), -1)
            for c in range(half)
          ],
          1,
        )
        for r in range(half)
      ],
      1,
    )
    x = y @ params[name]["kernel"]
    if tokenizer == "hmlp":
      x = x + params[name]["bias"]
    if f"norm_{i}" in params:
      x = gelu(norm(x, params[f"norm_{i}"]))
  if tokenizer == "conv":
    x = x @ params["project"]["kernel"] + params["project"]["bias"]
  found = np.asarray(quick_jit(tokens_of)(jnp.asarray(images)))
  expected = x.reshape(2, -1, 8)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


def test_stems_keep_examples_apart():
  """No statistics over the batch: an image alone gives its row of the batch."""
  tokens_of, _, _ = stem("conv", (8, 8), 4)
  images = drawn(2, 8, 8, 2)
  before = np.asarray(quick_jit(tokens_of)(jnp.asarray(images)))
  images[1] *= 100
  after = np.asarray(quick_jit(tokens_of)(jnp.asarray(images)))
  np.testing.assert_array_equal(before[0], after[0])
  assert (before[1] != after[1]).any()


def test_the_kernel_start_is_scaled_by_its_inputs():
  """Variance 1 / (P P C), whatever the patch, so that arms of a study start alike."""
  module = patches.LinearTokenizer(lay((16, 16), (8, 4), 4, "same"), 64)
  params = quick_jit(module.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))[
    "params"
  ]
  kernel = np.asarray(params["kernel"])
  assert kernel.shape == (8, 4, 3, 64)
  np.testing.assert_allclose(kernel.var() * 8 * 4 * 3, 1, rtol=0.1)
  assert not params["bias"].any()


def test_a_vit_takes_images_that_are_not_square():
  model = config_lib.override(
    config_lib.Config(),
    {
      "model.patch": (4, 2),
      "model.stride": (2, 2),
      "model.pad": "same",
      "model.width": 8,
      "model.heads": 2,
      "model.depth": 1,
    },
  ).model
  vit = models.ViT(model, models.geometry(model, Pair(8, 4)), 3)
  images = jnp.asarray(drawn(2, 8, 4, 1))
  shapes = jax.eval_shape(vit.init, jax.random.key(0), images)
  assert shapes["params"]["positions"].shape == (4 * 2 + 1, 8)
  assert jax.eval_shape(vit.apply, shapes, images).shape == (2, 3)

"""Augmentation against Pillow and NumPy, and its promises about keys and pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from vit_jax.config import Augment, ConfigError
from vit_jax.data import augment as augment_module
from vit_jax.data.augment import OPERATIONS, augment

ROWS, HEIGHT, WIDTH = 256, 6, 10
HYPER = {
  "erasing": np.float32(0.3),
  "mixup": np.float32(0.4),
  "cutmix": np.float32(1.0),
}
ALL = Augment(
  crop=2, flip=True, randaugment=(1, 8.0), erasing=0.3, mixup=0.4, cutmix=1.0
)

run = jax.jit(augment, static_argnums=0)


def keys(rows=ROWS, seed=0):
  return jax.random.split(jax.random.key(seed), rows)


def coordinates():
  """Returns an image [h, w, 3] of (column + 1, row + 1, noise)."""
  image = np.zeros((HEIGHT, WIDTH, 3), np.float32)
  image[..., 0] = np.arange(WIDTH)[None, :] + 1
  image[..., 1] = np.arange(HEIGHT)[:, None] + 1
  image[..., 2] = np.random.default_rng(0).uniform(0, 255, (HEIGHT, WIDTH))
  return image


def constants(rows=ROWS, channels=1):
  """Returns images of constant i with one-hot labels i."""
  shape = (rows, HEIGHT, WIDTH, channels)
  images = np.broadcast_to(np.arange(rows)[:, None, None, None], shape)
  return images.astype(np.float32), np.eye(rows, dtype=np.float32)


def same_image(rows=ROWS):
  images = np.broadcast_to(coordinates(), (rows, HEIGHT, WIDTH, 3))
  return images, np.eye(rows, dtype=np.float32)


def test_off_returns_the_arrays_themselves():
  images, labels = constants()
  out = augment(Augment(), keys(), images, labels, HYPER)
  assert out[0] is images and out[1] is labels


def test_shift_is_a_slice_of_the_padded_image_at_every_shift():
  images, labels = same_image()
  out, same_labels = run(Augment(crop=1), keys(), images, labels, HYPER)
  padded = np.pad(coordinates(), ((1, 1), (1, 1), (0, 0)))
  slices = {
    (y, x): padded[y : y + HEIGHT, x : x + WIDTH] for y in range(3) for x in range(3)
  }
  seen = [
    next(s for s in slices if np.array_equal(slices[s], row)) for row in np.asarray(out)
  ]
  counts = [seen.count(s) for s in slices]
  assert stats.chisquare(counts).pvalue > 0.01
  np.testing.assert_array_equal(same_labels, labels)


def test_flip_mirrors_half_of_the_rows():
  images, labels = same_image()
  out, _ = run(Augment(flip=True), keys(), images, labels, HYPER)
  out = np.asarray(out)
  mirrored = np.array([np.array_equal(row, coordinates()[:, ::-1]) for row in out])
  kept = np.array([np.array_equal(row, coordinates()) for row in out])
  assert (mirrored ^ kept).all()
  assert stats.binomtest(int(mirrored.sum()), ROWS).pvalue > 0.01


def test_random_resized_crop_is_crop_then_bilinear_resize():
  images, labels = same_image()
  out, _ = run(Augment(crop=(0.2, 1.0)), keys(), images, labels, HYPER)
  out = np.asarray(out)
  boxes = set()
  for row in out:
    # The border pixels of the result are those of the box, so they tell where it was.
    left, right = np.round(row[0, [0, -1], 0] - 1).astype(int)
    top, bottom = np.round(row[[0, -1], 0, 1] - 1).astype(int)
    box = (left, top, right + 1, bottom + 1)
    boxes.add(box)
    for channel in range(3):
      old = Image.fromarray(coordinates()[..., channel]).crop(box)
      new = old.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
      np.testing.assert_allclose(row[..., channel], np.asarray(new), atol=1e-3)
  assert len(boxes) > ROWS // 4


def test_whole_image_as_crop_changes_nothing():
  image = coordinates()
  out = augment_module.random_resized_crop(jax.random.key(0), image, (1.0, 1.0))
  np.testing.assert_allclose(out, image, rtol=1e-6)


def test_boxes_have_uniform_area_and_bounded_aspect():
  draw = jax.jit(
    jax.vmap(lambda u: augment_module._random_box(u, 900, 1500, (0.1, 1.0), 4 / 3))
  )
  uniform = np.random.default_rng(5).uniform(size=(1000, 4)).astype(np.float32)
  top, left, height, width = (np.asarray(a) for a in draw(uniform))
  share = height / 900 * width / 1500
  assert stats.kstest(share, stats.uniform(0.1, 0.9).cdf).pvalue > 0.01
  aspect = np.log((width / 1500) / (height / 900))
  small = share < 0.75  # A larger box cannot have every aspect.
  bound = np.log(4 / 3)
  assert stats.kstest(aspect[small], stats.uniform(-bound, 2 * bound).cdf).pvalue > 0.01
  assert (top >= 0).all() and (top + height <= 900).all()
  assert (left >= 0).all() and (left + width <= 1500).all()
  free = height < 800
  assert stats.kstest((top / (900 - height + 1))[free], "uniform").pvalue > 0.01


def pillow(name, image, sign, magnitude):
  """Returns what Pillow makes of `image` uint8 [h, w, C], as float [h, w, C]."""
  h, w, channels = image.shape
  m = magnitude / 10
  picture = Image.fromarray(image if channels == 3 else image[..., 0])
  factor = 1 + 0.9 * sign * m
  moves = {
    "shear_x": (1, 0.3 * m * sign, 0, 0, 1, 0),
    "shear_y": (1, 0, 0, 0.3 * m * sign, 1, 0),
    "translate_x": (1, 0, 0.45 * m * sign * w, 0, 1, 0),
    "translate_y": (1, 0, 0, 0, 1, 0.45 * m * sign * h),
  }
  if name in moves or name == "rotate":
    planes = []
    for channel in range(channels):
      plane = Image.fromarray(image[..., channel].astype(np.float32))
      if name == "rotate":
        new = plane.rotate(30 * m * sign, Image.Resampling.BILINEAR)
      else:
        new = plane.transform(
          (w, h), Image.Transform.AFFINE, moves[name], Image.Resampling.BILINEAR
        )
      planes.append(np.asarray(new))
    return np.stack(planes, -1)
  new = {
    "identity": lambda: picture,
    "autocontrast": lambda: ImageOps.autocontrast(picture),
    "equalize": lambda: ImageOps.equalize(picture),
    "solarize": lambda: ImageOps.solarize(picture, int(np.ceil(256 * (1 - m)))),
    "posterize": lambda: ImageOps.posterize(picture, round(8 - 4 * m)),
    "color": lambda: ImageEnhance.Color(picture).enhance(factor),
    "contrast": lambda: ImageEnhance.Contrast(picture).enhance(factor),
    "brightness": lambda: ImageEnhance.Brightness(picture).enhance(factor),
    "sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(factor),
  }[name]()
  return np.asarray(new, np.float32).reshape(h, w, channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_does_what_pillow_does(channels):
  rng = np.random.default_rng(1)
  h, w = 24, 31
  # Values off the full range and unevenly spread, so that no operation is idle.
  image = (40 + 150 * rng.uniform(size=(h, w, channels)) ** 2).astype(np.uint8)
  numbers = jnp.repeat(jnp.arange(len(OPERATIONS)), 2)
  signs = jnp.tile(jnp.array([-1.0, 1.0]), len(OPERATIONS))
  results = jax.jit(
    jax.vmap(augment_module.operate, (None, 0, 0, None)), static_argnums=3
  )(jnp.asarray(image, jnp.float32), numbers, signs, 7.0)
  exact = ("identity", "equalize", "solarize", "posterize")
  for number, sign, result in zip(numbers, signs, np.asarray(results)):
    name = OPERATIONS[int(number)]
    expected = pillow(name, image, float(sign), 7.0)
    moves = name.startswith(("rotate", "shear", "translate"))
    # Pillow rounds to whole numbers, once or twice, where the values change.
    tolerance = 0 if name in exact else 0.02 if moves else 1.6
    np.testing.assert_allclose(result, expected, atol=tolerance, err_msg=name)
    idle = name == "identity" or (name == "color" and channels == 1)
    assert np.array_equal(result, image) == idle, name


def test_flat_and_tiny_images_stay_finite_in_every_operation():
  every = jax.jit(
    jax.vmap(augment_module.operate, (None, 0, None, None)), static_argnums=3
  )
  image = jnp.full((1, 2, 3), 80.0)
  out = every(image, jnp.arange(len(OPERATIONS)), 1.0, 10.0)
  assert np.isfinite(out).all() and out.shape == (len(OPERATIONS), *image.shape)
  np.testing.assert_array_equal(out[:3], np.broadcast_to(image, (3, *image.shape)))


def test_operations_are_drawn_evenly_with_both_signs():
  # At magnitude 10 nearly every operation leaves another trace on this image.
  image = jnp.asarray(np.random.default_rng(2).uniform(30, 200, (HEIGHT, WIDTH, 3)))
  image = image.astype(jnp.float32)
  one = jax.jit(
    lambda keys, image: jax.vmap(augment_module.randaugment, (0, None, None, None))(
      keys, image, 1, 10
    )
  )
  out = np.asarray(one(keys(1024), image)).round(1)
  _, counts = np.unique(out.reshape(len(out), -1), axis=0, return_counts=True)
  # 10 operations of two signs, and 4 without one: equalize is idle on so few pixels.
  share = 1024 / 14
  expected = sorted([share / 2] * 18 + [share] * 3 + [2 * share])
  assert len(counts) in (21, 22)
  assert abs(counts.sum() - 1024) == 0
  assert counts.max() == pytest.approx(expected[-1], abs=40)
  assert counts.min() > share / 4


def test_erasing_blanks_a_rectangle_with_the_given_probability():
  images, labels = np.full((ROWS, 20, 30, 1), 7, np.float32), np.eye(ROWS)
  out, _ = run(Augment(erasing=0.9), keys(), images, labels, HYPER)
  out = np.asarray(out)[..., 0]
  changed = (out != 7).any((1, 2))
  # The probability is the traced one (0.3), not that of the config.
  assert stats.binomtest(int(changed.sum()), ROWS, 0.3).pvalue > 0.01
  shares, aspects = [], []
  for row in out[changed]:
    assert set(np.unique(row)) <= {0, 7}
    y, x = np.nonzero(row == 0)
    height, width = np.ptp(y) + 1, np.ptp(x) + 1
    assert len(y) == height * width
    shares.append(height * width / 600)
    aspects.append((width / 30) / (height / 20))
  assert 0.01 < min(shares) < 0.05 and 0.28 < max(shares) < 0.36
  assert 0.2 < min(aspects) < 0.5 and 2 < max(aspects) < 5


def test_mixup_mixes_neighbours_with_beta_weights():
  images, labels = constants(channels=3)
  out, mixed = run(Augment(mixup=0.1), keys(), images, labels, HYPER)
  mixed = np.asarray(mixed)
  own = np.diagonal(mixed)
  partner = mixed[np.arange(ROWS), np.arange(ROWS) ^ 1]
  np.testing.assert_allclose(own + partner, 1, rtol=1e-6)
  np.testing.assert_array_equal(own[::2], own[1::2])
  # The parameter is the traced one (0.4), not that of the config.
  assert stats.kstest(own[::2], stats.beta(0.4, 0.4).cdf).pvalue > 0.01
  expected = (mixed @ np.arange(ROWS, dtype=np.float32))[:, None, None, None]
  np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=1e-4)


@pytest.mark.parametrize("a", [0.02, 0.2, 0.5, 1.0, 8.0])
def test_beta_has_its_distribution(a):
  u, v = np.random.default_rng(6).uniform(size=(2, 2000)).astype(np.float32)
  drawn = np.asarray(augment_module._beta((u, v), jnp.float32(a)))
  assert (drawn >= 0).all() and (drawn <= 1).all()
  # At a = 0.02 most draws are nearer to 0 or 1 than float32 can say.
  inner = np.clip(drawn, 1e-5, 1 - 1e-5)
  grid = np.linspace(2e-5, 1 - 2e-5, 101)
  share = (inner[:, None] <= grid[None, :]).mean(0)
  np.testing.assert_allclose(share, stats.beta(a, a).cdf(grid), atol=0.035)
  if a >= 0.2:
    assert stats.kstest(drawn, stats.beta(a, a).cdf).pvalue > 0.01


def test_cutmix_weight_is_the_share_of_pixels_left():
  images, labels = constants()
  out, mixed = run(Augment(cutmix=1.0), keys(), images, labels, HYPER)
  out, mixed = np.asarray(out)[..., 0], np.asarray(mixed)
  for i in range(ROWS):
    swapped = out[i] == (i ^ 1)
    assert (swapped | (out[i] == i)).all()
    assert mixed[i, i] == pytest.approx(1 - swapped.mean(), abs=1e-6)
    assert mixed[i, i ^ 1] == pytest.approx(swapped.mean(), abs=1e-6)
    if swapped.any():
      y, x = np.nonzero(swapped)
      assert len(y) == (np.ptp(y) + 1) * (np.ptp(x) + 1)
      np.testing.assert_array_equal(swapped, out[i ^ 1] == i)
  # Boxes reach every pixel, the corners too.
  covered = (out != np.arange(ROWS)[:, None, None]).mean(0)
  assert covered.min() > 0.03


def test_cutmix_area_follows_the_paper():
  h, w, a = 40, 60, 0.7
  pixels, label = jax.jit(
    jax.vmap(lambda key: augment_module._weights(key, h, w, 0.0, a))
  )(keys(1000))
  np.testing.assert_allclose(np.asarray(pixels).mean((1, 2)), label, rtol=1e-5)
  rng = np.random.default_rng(3)
  expected = []
  for v in rng.beta(a, a, 1000):
    height, width = int(h * np.sqrt(1 - v)) // 2, int(w * np.sqrt(1 - v)) // 2
    y, x = rng.integers(h), rng.integers(w)
    rows = min(y + height, h) - max(y - height, 0)
    columns = min(x + width, w) - max(x - width, 0)
    expected.append(1 - rows * columns / (h * w))
  assert stats.ks_2samp(label, expected).pvalue > 0.01


def test_both_on_gives_each_pair_one_of_them():
  images, labels = constants()
  out, mixed = run(Augment(mixup=0.4, cutmix=1.0), keys(), images, labels, HYPER)
  pure = [set(np.unique(row)) <= {i, i ^ 1} for i, row in enumerate(np.asarray(out))]
  assert pure[::2] == pure[1::2]
  assert stats.binomtest(sum(pure[::2]), ROWS // 2).pvalue > 0.01
  value = np.asarray(out).mean((1, 2, 3))
  np.testing.assert_allclose(value, mixed @ np.arange(ROWS), rtol=1e-4)
  np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-6)


def test_members_have_their_own_strengths_and_zero_is_off():
  images, labels = constants()
  config = Augment(erasing=0.3, mixup=0.4, cutmix=1.0)
  hyper = {
    "erasing": jnp.array([0.0, 0.0, 0.0, 1.0]),
    "mixup": jnp.array([0.0, 0.0, 0.4, 0.0]),
    "cutmix": jnp.array([0.0, 1.0, 0.0, 0.0]),
  }
  members = jax.jit(jax.vmap(augment, (None, None, None, None, 0)), static_argnums=0)(
    config, keys(), images, labels, hyper
  )
  np.testing.assert_array_equal(members[0][0], images)
  np.testing.assert_array_equal(members[1][0], labels)
  cutmix = run(Augment(cutmix=1.0), keys(), images, labels, HYPER)
  np.testing.assert_allclose(members[0][1], cutmix[0], rtol=1e-6)
  np.testing.assert_allclose(members[1][1], cutmix[1], rtol=1e-6)
  mixup = run(Augment(mixup=0.4), keys(), images, labels, HYPER)
  np.testing.assert_allclose(members[1][2], mixup[1], rtol=1e-6)
  assert (np.asarray(members[0][3]) == 0).any((1, 2, 3)).all()


def test_soft_labels_stay_distributions_and_draws_do_not_depend_on_other_settings():
  images, _ = same_image()
  labels = np.random.default_rng(4).dirichlet([1.0] * ROWS, ROWS).astype(np.float32)
  out, mixed = run(ALL, keys(), images, labels, HYPER)
  assert out.dtype == jnp.float32 and out.shape == images.shape
  assert out.min() >= 0 and out.max() <= 255 + 1e-3
  np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-5)
  only = run(Augment(mixup=0.4, cutmix=1.0), keys(), images, labels, HYPER)[1]
  np.testing.assert_allclose(mixed, only, rtol=1e-6, atol=1e-7)


def test_rows_with_the_same_image_differ():
  images, labels = same_image()
  for config in (Augment(crop=(0.2, 1.0)), ALL):
    out = np.asarray(run(config, keys(), images, labels, HYPER)[0])
    different = len(np.unique(out.reshape(ROWS, -1), axis=0))
    assert different > 20, config


def test_rows_do_not_depend_on_their_place_in_the_batch():
  images, labels = same_image()
  images = images * np.linspace(0.2, 1, ROWS, dtype=np.float32)[:, None, None, None]
  whole = run(ALL, keys(), images, labels, HYPER)
  order = np.roll(np.arange(ROWS), 6)
  moved = run(ALL, keys()[order], images[order], labels[order], HYPER)
  np.testing.assert_array_equal(moved[0], whole[0][order])
  np.testing.assert_array_equal(moved[1], whole[1][order])


def test_two_halves_make_the_whole():
  config = Augment(mixup=0.4, cutmix=1.0)
  images, labels = constants()
  whole = run(config, keys(), images, labels, HYPER)
  for half in (slice(0, 128), slice(128, 256)):
    part = run(config, keys()[half], images[half], labels[half], HYPER)
    np.testing.assert_allclose(part[0], whole[0][half], rtol=1e-6)
    np.testing.assert_allclose(part[1], whole[1][half], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_four_devices_mix_the_same_pairs(how):
  config = Augment(mixup=0.4, cutmix=1.0)
  images, labels = constants()
  mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
  rows = NamedSharding(mesh, P("data"))
  inputs = [jax.device_put(x, rows) for x in (keys(), images, labels)]
  if how == "jit":
    out, mixed = run(config, *inputs, HYPER)
  else:
    out, mixed = jax.jit(
      jax.shard_map(
        lambda *args: augment(config, *args),
        mesh=mesh,
        in_specs=(P("data"), P("data"), P("data"), P()),
        out_specs=P("data"),
      )
    )(*inputs, HYPER)
  value = np.asarray(out).mean((1, 2, 3))
  np.testing.assert_allclose(
    value, np.asarray(mixed) @ np.arange(ROWS), rtol=1e-4, atol=1e-4
  )
  alone = run(config, keys(), images, labels, HYPER)
  np.testing.assert_allclose(out, alone[0], rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(mixed, alone[1], rtol=1e-6, atol=1e-7)


def test_what_cannot_work_is_refused():
  images, labels = constants(3)
  with pytest.raises(ValueError, match="pairs of rows, got 3"):
    augment(Augment(mixup=1.0), keys(3), images, labels, HYPER)
  for setting in [(0, 5.0), (2, 11.0)]:
    with pytest.raises(ConfigError, match="magnitude from 0 to 10"):
      augment(Augment(randaugment=setting), keys(3), images, labels, HYPER)
  with pytest.raises(ConfigError, match="have 2"):
    two = np.repeat(images, 2, -1)
    augment(Augment(randaugment=(1, 5.0)), keys(3), two, labels, HYPER)

"""Random changes of the training images: pure, per example, inside the compiled step.

Every example draws from its own key and nothing else, so a batch may be cut over
devices or micro-batches in any way (between pairs of rows, where rows are mixed) and
the result stays the same. The order is crop, flip, RandAugment, erasing, mixing. What
the config leaves off is not in the program, and the arrays come back as they were.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.config import Augment, ConfigError

# Tags folded into an example's key. An operation then draws all it needs as one array
# of uniform numbers: every further call of the generator costs compile time.
_CROP, _FLIP, _RANDAUGMENT, _ERASING, _MIX = range(1, 6)

# The operations of RandAugment, in the order of their numbers: those that change the
# values of pixels, then those that move pixels.
OPERATIONS = (
  "identity",
  "autocontrast",
  "equalize",
  "solarize",
  "posterize",
  "color",
  "contrast",
  "brightness",
  "sharpness",
  "rotate",
  "shear_x",
  "shear_y",
  "translate_x",
  "translate_y",
)
_FIRST_MOVE = OPERATIONS.index("rotate")

# Red, green and blue in the grey value of a pixel (ITU-R BT.601).
_GREY = (0.299, 0.587, 0.114)


def augment(config: Augment, keys, images, labels, hyper, present=None):
  """Changes a batch of training images at random, and its labels with them.

  Mixing (mixup, CutMix) works on pairs: the partner of row i is row i ^ 1, that is
  rows 0 and 1, 2 and 3 and so on. What a pair draws comes from the key of its even
  row and holds for both rows: the same weight, or the same box. With weight w, row i
  becomes w * row i + (1 - w) * row (i ^ 1), labels alike, so the two rows of a pair
  are mirror images, and the labels of a pair keep their sum.

  * mixup (Zhang et al. 2018): w ~ Beta(a, a) with a = hyper["mixup"].
  * CutMix (Yun et al. 2019): a box with the share 1 - v, v ~ Beta(a, a) with
    a = hyper["cutmix"], of the shape of the image, around a uniform centre and clipped
    at the border. The pair swaps the contents of the box; w is the share of the pixels
    outside the clipped box.

  With both, each pair takes one of them, each with probability 1/2. A traced strength
  of 0 (a member of a population that does not mix) is exactly no mixing, and the other
  kind then takes all pairs. A pair with a row that is not present is not mixed.

  Args:
    config: decides which operations are in the program.
    keys: typed random keys [B], one for an example.
    images: float32 [B, h, w, C], values from 0 to 255.
    labels: float32 [B, K], rows sum to 1.
    hyper: traced scalars by name: "erasing" (probability), "mixup" and "cutmix" (Beta
      parameters); only those that `config` has on are read.
    present: bool [B], false where a row only fills the batch; None: all are present.

  Returns:
    Images and labels of the same shape and type.

  Raises:
    ValueError: mixing with an odd number of rows (of a device, under shard_map).
    ConfigError: RandAugment out of range, or on images without 1 or 3 channels.
  """
  if isinstance(config.crop, tuple):
    images = jax.vmap(random_resized_crop, (0, 0, None))(
      _tagged(keys, _CROP), images, config.crop
    )
  elif config.crop > 0:
    images = shifted_crop(_tagged(keys, _CROP), images, config.crop)
  if config.flip:
    mirrored = jax.vmap(jax.random.bernoulli)(_tagged(keys, _FLIP))
    images = jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
  if config.randaugment is not None:
    count, magnitude = config.randaugment
    if count < 1 or not 0 <= magnitude <= 10:
      raise ConfigError(
        f"augment.randaugment={config.randaugment}: expected 1 or more operations and "
        "a magnitude from 0 to 10; None is off"
      )
    if images.shape[-1] not in (1, 3):
      raise ConfigError(
        f"augment.randaugment={config.randaugment} works on 1 or 3 channels, the "
        f"images have {images.shape[-1]}; try augment.randaugment=None"
      )
    images = jax.vmap(randaugment, (0, 0, None, None))(
      _tagged(keys, _RANDAUGMENT), images, count, magnitude
    )
  if config.erasing > 0:
    images = jax.vmap(erase, (0, 0, None))(
      _tagged(keys, _ERASING), images, hyper["erasing"]
    )
  if config.mixup > 0 or config.cutmix > 0:
    images, labels = _mix(config, keys, images, labels, hyper, present)
  return images, labels


def shifted_crop(keys, images, pad):
  """Pads `pad` zeros on every side and cuts at a shift uniform in 0..2 pad (both axes).

  Args:
    keys: random keys [B].
    images: [B, h, w, C].
    pad: pixels.

  Returns:
    Images [B, h, w, C].
  """

  def one(key, image):
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    top, left = _integers(jax.random.uniform(key, (2,)), 2 * pad + 1)
    return lax.dynamic_slice(padded, (top, left, 0), image.shape)

  return jax.vmap(one)(keys, images)


def random_resized_crop(key, image, area):
  """Enlarges a random box to the size of the image (Szegedy et al. 2015).

  The share of the area is uniform in `area`, the aspect log-uniform in 3/4..4/3, the
  place uniform over whole pixels. Pixels are interpolated linearly between those of
  the box, as in cropping first and resizing then. There is no antialiasing, as nothing
  is ever made smaller.

  Args:
    key: random key.
    image: [h, w, C].
    area: least and greatest share of the area.

  Returns:
    An image [h, w, C].
  """
  h, w, _ = image.shape
  top, left, height, width = _random_box(
    jax.random.uniform(key, (4,)), h, w, area, 4 / 3
  )
  return _enlarge(image, top, left, height, width)


def randaugment(key, image, count, magnitude):
  """Applies `count` of `OPERATIONS`, each drawn anew with its sign (Cubuk et al. 2020).

  Args:
    key: random key.
    image: [h, w, C], C is 1 or 3.
    count: number of operations.
    magnitude: from 0 to 10, see `operate`.

  Returns:
    An image [h, w, C], values from 0 to 255.
  """
  draws = jax.random.uniform(key, (count, 2))
  numbers = _integers(draws[:, 0], len(OPERATIONS))
  signs = jnp.where(draws[:, 1] < 0.5, -1.0, 1.0)
  for number, sign in zip(numbers, signs):
    image = operate(image, number, sign, magnitude)
  return image


def operate(image, number, sign, magnitude):
  """Applies one operation, with the meaning it has in Pillow.

  With m = magnitude / 10 and s the sign, +1 or -1:

  * identity, autocontrast (stretch every channel to 0..255), equalize (every channel).
  * solarize: values v of at least 256 (1 - m) become 255 - v.
  * posterize: keep the upper round(8 - 4 m) bits.
  * color, contrast, brightness, sharpness: the image is mixed with its grey copy, its
    mean grey, black, or a smoothed copy; factor 1 + 0.9 s m, 1 is the image itself.
  * rotate by 30 s m degrees; shear_x, shear_y by 0.3 s m pixels a pixel from the upper
    left corner; translate_x, translate_y by 0.45 s m of the width or height. Linear
    between pixels; what comes from outside is 0.

  The examples of a batch differ in their operation, so the compiled program does not
  branch: it computes all that change values and, as all moves are one map with another
  matrix, a single move.

  Args:
    image: [h, w, C], C is 1 or 3, values from 0 to 255.
    number: int32 scalar, an index of `OPERATIONS`.
    sign: float32 scalar.
    magnitude: Python number from 0 to 10.

  Returns:
    An image [h, w, C], values from 0 to 255.
  """
  h, w, _ = image.shape
  m = magnitude / 10
  grey = _grey(image)
  factor = 1 + 0.9 * sign * m
  step = 2.0 ** (8 - round(8 - 4 * m))
  values = (
    image,
    _autocontrast(image),
    _equalize(image),
    jnp.where(image >= 256 * (1 - m), 255 - image, image),
    step * jnp.floor(image / step),
    _blend(grey, image, factor),
    _blend(jnp.mean(grey), image, factor),
    _blend(0.0, image, factor),
    _blend(_smooth(image), image, factor),
  )
  matrices = _matrices(h, w, sign, m)
  moved = _move(image, matrices[jnp.maximum(number - _FIRST_MOVE, 0)])
  return lax.select_n(jnp.minimum(number, _FIRST_MOVE), *values, moved)


def erase(key, image, probability):
  """Blanks a random rectangle (Zhong et al. 2020).

  The share of the area is uniform in 0.02..0.33, the aspect log-uniform in 1/3.3..3.3.

  Args:
    key: random key.
    image: [h, w, C].
    probability: traced scalar; otherwise the image is left alone.

  Returns:
    An image [h, w, C]; the rectangle holds 0, like all that lies outside an image.
  """
  h, w, _ = image.shape
  draws = jax.random.uniform(key, (5,))
  top, left, height, width = _random_box(draws[:4], h, w, (0.02, 0.33), 3.3)
  inside = _box_mask(h, w, top, left, top + height, left + width)
  inside &= draws[4] < probability
  return jnp.where(inside[:, :, None], 0.0, image)


def _mix(config, keys, images, labels, hyper, present):
  b, h, w, _ = images.shape
  if b % 2:
    raise ValueError(
      f"mixing needs pairs of rows, got {b}; try an even number of examples on every "
      "device and in every micro-batch, or augment.mixup=0 and augment.cutmix=0"
    )
  even_keys = keys.reshape(b // 2, 2)[:, 0]
  # The kind that is off has strength 0, and is then never drawn.
  mixup = hyper["mixup"] if config.mixup > 0 else 0.0
  cutmix = hyper["cutmix"] if config.cutmix > 0 else 0.0
  pixel_weights, label_weights = jax.vmap(_weights, (0, None, None, None, None))(
    _tagged(even_keys, _MIX), h, w, mixup, cutmix
  )
  if present is not None:
    both = present.reshape(b // 2, 2).all(1)
    pixel_weights = jnp.where(both[:, None, None], pixel_weights, 1.0)
    label_weights = jnp.where(both, label_weights, 1.0)
  images = _mix_pairs(images, pixel_weights[:, None, :, :, None])
  return images, _mix_pairs(labels, label_weights[:, None, None])


def _weights(key, h, w, mixup, cutmix):
  """Draws one pair's weights of a row itself: of its pixels [h, w], of its label."""
  kind, y, x, *draws = jax.random.uniform(key, (5,))
  # A strength of 0 leaves all pairs to the other kind.
  mixes = jnp.where(kind < 0.5, mixup > 0, cutmix <= 0)
  v = _beta(draws, jnp.where(mixes, mixup, cutmix))
  side = jnp.sqrt(1 - v)
  half_height = jnp.floor(h * side).astype(jnp.int32) // 2
  half_width = jnp.floor(w * side).astype(jnp.int32) // 2
  y, x = _integers(y, h), _integers(x, w)
  box = _box_mask(
    h, w, y - half_height, x - half_width, y + half_height, x + half_width
  )
  share = 1 - jnp.sum(box) / (h * w)
  return jnp.where(mixes, v, 1.0 - box), jnp.where(mixes, v, share)


def _mix_pairs(rows, weight):
  """Returns weight * row i + (1 - weight) * row (i ^ 1); `weight` [B / 2, 1, ...]."""
  pairs = rows.reshape(rows.shape[0] // 2, 2, *rows.shape[1:])
  return (weight * pairs + (1 - weight) * pairs[:, ::-1]).reshape(rows.shape)


def _beta(draws, a):
  """Turns two uniform numbers into one from Beta(a, a); exactly 1 where `a` is 0.

  If T has Student's t-distribution with 2a degrees of freedom, then
  1/2 + T / (2 sqrt(2a + T^2)) ~ Beta(a, a), and T = sqrt(2a (U^(-1/a) - 1)) cos(2 pi V)
  (Bailey 1994). Unlike a ratio of gamma variates this takes no loop of rejections.
  """
  on = a > 0
  power = jnp.log(draws[0]) / jnp.where(on, a, 1.0)  # log r, where r = U^(1/a)
  r, rest = jnp.exp(power), -jnp.expm1(power)
  cos = jnp.cos(2 * math.pi * draws[1])
  value = 0.5 + 0.5 * cos * jnp.sqrt(rest / (r + rest * cos**2))
  # Rounding may lead just outside, where 1 - value would have no root.
  return jnp.where(on, jnp.clip(value, 0.0, 1.0), 1.0)


def _grey(image):
  """Returns the grey copy of `image`, of the same shape."""
  if image.shape[-1] == 1:
    return image
  grey = jnp.sum(image * jnp.array(_GREY)[None, None, :], -1, keepdims=True)
  return jnp.broadcast_to(grey, image.shape)


def _blend(other, image, factor):
  return jnp.clip(other + factor * (image - other), 0.0, 255.0)


def _smooth(image):
  """Weighs every pixel with its 8 neighbours, 5 to 1 each; the border stays."""
  h, w, _ = image.shape
  around = sum(image[y : h - 2 + y, x : w - 2 + x] for y in range(3) for x in range(3))
  inner = image[1:-1, 1:-1]
  return image.at[1:-1, 1:-1].set((around + 4 * inner) / 13)


def _autocontrast(image):
  low = jnp.min(image, (0, 1), keepdims=True)
  high = jnp.max(image, (0, 1), keepdims=True)
  flat = high <= low
  scale = 255 / jnp.where(flat, 1.0, high - low)
  return jnp.where(flat, image, (image - low) * scale)


def _equalize(image):
  """Spreads the values of each channel evenly; they are rounded to integers first."""

  def channel(values):
    values = jnp.clip(jnp.round(values), 0, 255).astype(jnp.int32)
    counts = jnp.zeros(256, jnp.int32).at[values].add(1)
    below = jnp.cumsum(counts) - counts
    # The size of a step leaves out the brightest value that occurs.
    step = (values.size - counts[jnp.max(values)]) // 255
    table = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return step, table[values].astype(image.dtype)

  step, spread = jax.vmap(channel, -1, (0, -1))(image)
  return jnp.where((step == 0)[None, None, :], image, spread)


def _matrices(h, w, sign, m):
  """Returns [5, 2, 3]: for each move, where a point (x, y, 1) of the new image lies in
  the old one, in the order of `OPERATIONS`."""
  one, zero = jnp.ones(()), jnp.zeros(())
  angle = sign * (math.radians(30) * m)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  x, y = w / 2, h / 2
  shear, shift = 0.3 * m * sign, 0.45 * m * sign
  return jnp.array(
    [
      [[cos, -sin, x - x * cos + y * sin], [sin, cos, y - x * sin - y * cos]],
      [[one, shear, zero], [zero, one, zero]],
      [[one, zero, zero], [shear, one, zero]],
      [[one, zero, shift * w], [zero, one, zero]],
      [[one, zero, zero], [zero, one, shift * h]],
    ]
  )


def _move(image, matrix):
  """Moves pixels: linear between the old ones, 0 where the point lies outside."""
  h, w, _ = image.shape
  x, y = jnp.arange(w)[None, :] + 0.5, jnp.arange(h)[:, None] + 0.5
  (xx, xy, x1), (yx, yy, y1) = matrix
  x, y = xx * x + xy * y + x1, yx * x + yy * y + y1
  inside = (x >= 0) & (x < w) & (y >= 0) & (y < h)
  # Centres of pixels lie at half numbers.
  left, top = jnp.floor(x - 0.5), jnp.floor(y - 0.5)
  right_share, lower_share = (x - 0.5 - left)[..., None], (y - 0.5 - top)[..., None]

  def pixels(dy, dx):
    rows = jnp.clip(top.astype(jnp.int32) + dy, 0, h - 1)
    columns = jnp.clip(left.astype(jnp.int32) + dx, 0, w - 1)
    return image[rows, columns]

  upper = pixels(0, 0) * (1 - right_share) + pixels(0, 1) * right_share
  lower = pixels(1, 0) * (1 - right_share) + pixels(1, 1) * right_share
  moved = upper * (1 - lower_share) + lower * lower_share
  return jnp.where(inside[..., None], moved, 0.0)


def _random_box(draws, h, w, area, greatest_aspect):
  """Draws a box of whole pixels inside an image.

  Aspect means that of the box over that of the image, so that an oblong image has
  oblong boxes. Where others redraw boxes that do not fit, the range of the aspect is
  cut to what fits: the share of the area stays uniform, and one draw is enough.

  Args:
    draws: four numbers from 0 to 1.
    h, w: size of the image.
    area: least and greatest share of the area.
    greatest_aspect: the aspect is log-uniform from 1 / this to this.

  Returns:
    Top, left, height, width: int32 scalars.
  """
  share = area[0] + (area[1] - area[0]) * draws[0]
  limit = jnp.minimum(math.log(greatest_aspect), -jnp.log(share))
  aspect = jnp.exp(limit * (2 * draws[1] - 1))
  height = jnp.clip(jnp.round(h * jnp.sqrt(share / aspect)).astype(jnp.int32), 1, h)
  width = jnp.clip(jnp.round(w * jnp.sqrt(share * aspect)).astype(jnp.int32), 1, w)
  top, left = _integers(draws[2], h - height + 1), _integers(draws[3], w - width + 1)
  return top, left, height, width


def _box_mask(h, w, top, left, bottom, right):
  """Returns bool [h, w], true in rows top..bottom - 1 and columns left..right - 1."""
  y, x = jnp.arange(h)[:, None], jnp.arange(w)[None, :]
  return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def _enlarge(image, top, left, height, width):
  """Resizes the box of `image` [h, w, C] to [h, w, C], linearly between its pixels."""

  def weights(size, start, length):
    # Centres of the new pixels in pixels of the old image, kept within the box.
    centre = (jnp.arange(size) + 0.5) * (length / size) - 0.5
    centre = start + jnp.clip(centre, 0.0, length - 1.0)
    return jnp.maximum(0.0, 1.0 - jnp.abs(centre[:, None] - jnp.arange(size)[None, :]))

  h, w, _ = image.shape
  return jnp.einsum(
    "yh,hwc,xw->yxc",
    weights(h, top, height),
    image,
    weights(w, left, width),
    precision=lax.Precision.HIGHEST,
  )


def _integers(draws, count):
  """Turns uniform numbers from 0 to below 1 into integers from 0 to count - 1."""
  return jnp.floor(draws * count).astype(jnp.int32)


def _tagged(keys, tag):
  return jax.vmap(jax.random.fold_in, (0, None))(keys, tag)

"""Patches: where they lie, which pixels they see, and how they become tokens.

The only module that knows the grid of a patch size, stride and padding.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from vit_jax import config as config_lib
from vit_jax.config import ConfigError, Pair

PAD_MODES = {"zero": "constant", "edge": "edge", "reflect": "reflect"}


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The window of each token on the image, in pixels.

  Attributes:
    image: height and width of the image.
    patch: height and width of a window.
    stride: distance between neighbouring windows.
    pads: (top, bottom), (left, right) pixels added around the image.
    pad_mode: what they hold.
  """

  image: Pair
  patch: Pair
  stride: Pair
  pads: tuple[tuple[int, int], tuple[int, int]]
  pad_mode: str = "zero"

  @functools.cached_property
  def grid(self) -> Pair:
    """Rows and columns of windows: floor((size + pads - patch) / stride) + 1."""
    return Pair(
      *(
        (size + sum(pad) - patch) // stride + 1
        for size, pad, patch, stride in self._axes()
      )
    )

  @property
  def tokens(self) -> int:
    return self.grid.height * self.grid.width

  @property
  def overlaps(self) -> bool:
    return self.patch != self.stride

  def starts(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first pixel row and column of the windows; below 0 in the padding."""
    return tuple(
      np.arange(cells) * stride - pad[0]
      for cells, (_, pad, _, stride) in zip(self.grid, self._axes())
    )

  def centres(self) -> np.ndarray:
    """Returns the pixel centre (y, x) of each window, [tokens, 2], row by row."""
    rows, columns = (
      start + (patch - 1) / 2 for start, patch in zip(self.starts(), self.patch)
    )
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2)

  def coverage(self) -> np.ndarray:
    """Returns how many windows see each pixel, [height, width] integers."""
    counts = []
    for start, patch, size in zip(self.starts(), self.patch, self.image):
      pixels = np.arange(size)
      inside = (pixels[:, None] >= start) & (pixels[:, None] < start + patch)
      counts.append(inside.sum(1))
    return counts[0][:, None] * counts[1]

  def _axes(self):
    return zip(self.image, self.pads, self.patch, self.stride)


def geometry(model: config_lib.Model, image: Pair) -> Geometry:
  """Returns the windows that a model's tokens see on an image of this size.

  Raises:
    ConfigError: windows that cannot be laid so, with sizes that can.
  """
  patch = model.patch
  stride = model.stride or patch
  if min(*image) < 1:
    raise ConfigError(f"data.image_size={tuple(image)} must be positive")
  if min(*patch) < 1 or min(*stride) < 1:
    raise ConfigError(
      f"model.patch={tuple(patch)} and model.stride={tuple(stride)} must be positive"
    )
  if stride.height > patch.height or stride.width > patch.width:
    raise ConfigError(
      f"model.stride={tuple(stride)} above model.patch={tuple(patch)} would leave "
      f"pixels between the patches unseen; try a stride up to {tuple(patch)}"
    )
  if model.tokenizer in ("conv", "hmlp"):
    return _stem_geometry(model, image, patch, stride)
  if model.pad == "same":
    totals = [p - s for p, s in zip(patch, stride)]
    pads = tuple((t // 2, t - t // 2) for t in totals)
  else:
    pads = tuple((p, p) for p in model.pad)
  for size, pad, side, step, axis in zip(
    image, pads, patch, stride, ("height", "width")
  ):
    _check_axis(model, size, pad, side, step, axis)
  return Geometry(image, patch, stride, pads, model.pad_mode)


def _check_axis(model, size, pad, patch, stride, axis):
  low, high = pad
  if low < 0 or low >= patch or high >= patch:
    raise ConfigError(
      f"model.pad={low} in {axis} must be from 0 to {patch - 1}: more would make "
      "patches that hold padding only"
    )
  if model.pad_mode == "reflect" and max(pad) >= size:
    raise ConfigError(
      f"model.pad={max(pad)} cannot be reflected from {size} pixels of {axis}; try "
      'model.pad_mode="edge"'
    )

  def unseen(size):
    if size + low + high < patch:
      return size
    cells = (size + low + high - patch) // stride + 1
    return max(0, size + low - ((cells - 1) * stride + patch))

  if unseen(size):
    works = [s for s in range(1, size + patch + stride) if not unseen(s)]
    near = sorted(sorted(works, key=lambda s: abs(s - size))[:2])
    raise ConfigError(
      f"data.image_size {axis} {size} with model.patch={patch}, "
      f"model.stride={stride}, model.pad={low} leaves {unseen(size)} pixels unseen; "
      f"try a size of {' or '.join(map(str, near))}"
      + (', or model.pad="same"' if size % stride == 0 else "")
    )


def _stem_geometry(model, image, patch, stride):
  """Stems have windows of their own: 2 P - 1 for stacked 3x3 convolutions of stride 2
  (the window of k of them is 2^(k+1) - 1), P for the non-overlapping hMLP."""
  side = patch.height
  if patch != stride or patch.height != patch.width:
    raise ConfigError(
      f"model.tokenizer={model.tokenizer!r} has windows of its own: leave "
      "model.stride at None and model.patch square"
    )
  if side < 2 or side & (side - 1):
    raise ConfigError(
      f"model.tokenizer={model.tokenizer!r} halves the image step by step: "
      f"model.patch={side} must be 2, 4, 8, 16, ..."
    )
  if model.pad not in (Pair(0, 0), "same") or model.pad_mode != "zero":
    raise ConfigError(
      f"model.tokenizer={model.tokenizer!r} pads by itself: leave model.pad at 0 and "
      "model.pad_mode at 'zero'"
    )
  for size, axis in zip(image, ("height", "width")):
    if size % side:
      near = sorted({max(side, size // side * side), (size // side + 1) * side})
      raise ConfigError(
        f"data.image_size {axis} {size} is not a multiple of model.patch={side}; try "
        f"{' or '.join(map(str, near))}"
      )
  if model.tokenizer == "hmlp":
    return Geometry(image, patch, stride, ((0, 0), (0, 0)))
  window = Pair(2 * side - 1, 2 * side - 1)
  return Geometry(image, window, stride, ((side - 1, 0), (side - 1, 0)))


def pad(images: Float[Array, "B h w C"], geometry: Geometry) -> Array:
  """Adds the padding of the geometry around the images."""
  if not any(map(any, geometry.pads)):
    return images
  widths = ((0, 0), *geometry.pads, (0, 0))
  return jnp.pad(images, widths, mode=PAD_MODES[geometry.pad_mode])


def patchify(
  images: Float[Array, "B h w C"], geometry: Geometry
) -> Float[Array, "B N P"]:
  """Cuts images into flat patches of P = patch height x patch width x C values.

  Works with any overlap; `LinearTokenizer` needs it only where there is none.
  """
  images = pad(images, geometry)
  (rows, columns), (ph, pw) = geometry.grid, geometry.patch
  batch, channels = images.shape[0], images.shape[-1]
  if not geometry.overlaps:
    images = images[:, : rows * ph, : columns * pw]
    cells = images.reshape(batch, rows, ph, columns, pw, channels)
    cells = cells.transpose(0, 1, 3, 2, 4, 5)
  else:
    sh, sw = geometry.stride
    y = np.arange(rows)[:, None] * sh + np.arange(ph)
    x = np.arange(columns)[:, None] * sw + np.arange(pw)
    cells = images[:, y[:, None, :, None], x[None, :, None, :]]
  return cells.reshape(batch, rows * columns, ph * pw * channels)


class LinearTokenizer(nn.Module):
  """One linear map of each patch: a convolution of kernel `patch` and step `stride`."""

  geometry: Geometry
  width: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, "B h w C"]) -> Float[Array, "B N D"]:
    g = self.geometry
    init = nn.initializers.variance_scaling(
      1.0, "fan_in", "truncated_normal", in_axis=(0, 1, 2), out_axis=3
    )
    kernel = self.param("kernel", init, (*g.patch, images.shape[-1], self.width))
    bias = self.param("bias", nn.initializers.zeros, (self.width,))
    images, kernel = images.astype(self.dtype), kernel.astype(self.dtype)
    if g.overlaps:
      tokens = convolve(pad(images, g), kernel, g.stride)
      tokens = tokens.reshape(images.shape[0], g.tokens, self.width)
    else:
      tokens = patchify(images, g) @ kernel.reshape(-1, self.width)
    return tokens + bias.astype(self.dtype)[None, None]


def convolve(images, kernel, stride, pads="VALID"):
  """Returns the strided convolution of images [B h w C], kernel [kh kw C D]."""
  return jax.lax.conv_general_dilated(
    images, kernel, tuple(stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


def windows_3x3(x: Float[Array, "B h w C"]) -> Float[Array, "B h2 w2 nineC"]:
  """Returns the 3x3 windows at stride 2 with a row of zeros above and on the left.

  A linear map of them is the convolution; as a product of matrices it is far faster on
  a CPU, above all backwards.
  """
  x = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
  rows, columns = x.shape[1] - 2, x.shape[2] - 2
  cells = [
    x[:, i : i + rows + 1 : 2, j : j + columns + 1 : 2]
    for i in range(3)
    for j in range(3)
  ]
  return jnp.concatenate(cells, axis=-1)


class ConvTokenizer(nn.Module):
  """Stacked 3x3 convolutions of stride 2, each with LayerNorm and GELU, then 1x1.

  The stem of Xiao et al. 2021 (Early convolutions help transformers see better), with
  LayerNorm in place of BatchNorm so that examples stay independent. Channels double
  up to `width`.
  """

  geometry: Geometry
  width: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, "B h w C"]) -> Float[Array, "B N D"]:
    x = images.astype(self.dtype)
    halvings = self.geometry.stride.height.bit_length() - 1
    for i in range(halvings):
      channels = max(8, self.width >> (halvings - 1 - i))
      x = nn.Dense(channels, use_bias=False, dtype=self.dtype, name=f"conv_{i}")(
        windows_3x3(x)
      )
      x = nn.LayerNorm(use_fast_variance=False, dtype=jnp.float32, name=f"norm_{i}")(x)
      x = nn.gelu(x).astype(self.dtype)
    x = nn.Dense(self.width, dtype=self.dtype, name="project")(x)
    return x.reshape(x.shape[0], -1, self.width)


class HMLPTokenizer(nn.Module):
  """Patches of patches: linear maps of 2x2 neighbours with LayerNorm and GELU between.

  The hMLP stem of Touvron et al. 2022 (Three things everyone should know about vision
  transformers), with LayerNorm in place of BatchNorm: non-linear, no overlap.
  """

  geometry: Geometry
  width: int
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, images: Float[Array, "B h w C"]) -> Float[Array, "B N D"]:
    x = images.astype(self.dtype)
    steps = self.geometry.stride.height.bit_length() - 1
    for i in range(steps):
      last = i == steps - 1
      batch, height, columns, channels = x.shape
      x = x.reshape(batch, height // 2, 2, columns // 2, 2, channels)
      x = x.transpose(0, 1, 3, 2, 4, 5)
      x = x.reshape(batch, height // 2, columns // 2, 4 * channels)
      features = self.width if last else max(8, self.width // 4)
      x = nn.Dense(features, dtype=self.dtype, name=f"dense_{i}")(x)
      if not last:
        x = nn.LayerNorm(use_fast_variance=False, dtype=jnp.float32, name=f"norm_{i}")(
          x
        )
        x = nn.gelu(x).astype(self.dtype)
    return x.reshape(x.shape[0], -1, self.width)


TOKENIZERS = {"linear": LinearTokenizer, "conv": ConvTokenizer, "hmlp": HMLPTokenizer}

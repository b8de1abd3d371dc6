"""The masked autoencoder of He et al. 2022: rebuild the patches that the ViT does not
see. Its parameters are those of the ViT under `encoder/`, and a light decoder."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax import config as config_lib
from vit_jax.config import ConfigError
from vit_jax.models import patches, positions, vit

DECODER_BLOCKS = 2
# Added to the variance of a patch, so that a flat one (all pixels alike) becomes 0.
FLAT = 1e-6
# Parts of the random key of an example.
MASK, ENCODER = 0, 1


class MaskedAutoencoder(nn.Module):
  """Hides patches of each image and returns how badly they are rebuilt.

  The encoder sees the pixels of the visible windows and nothing else. Where windows
  overlap (`model.stride` below `model.patch`, or the conv stem), that includes the rim
  of hidden ones, so the task is easier than with the same share hidden without overlap.

  Attributes:
    config, geometry, classes: of the ViT; its head and attention pool have no
      parameters here, since nothing reads them.
    visible: number of patches of an image that the encoder sees.
  """

  config: config_lib.Model
  geometry: patches.Geometry
  classes: int
  visible: int

  def setup(self):
    self.encoder = vit.ViT(self.config, self.geometry, self.classes)
    self.decoder = Decoder(decoder_config(self.config), self.geometry)

  def __call__(
    self, images: Float[Array, "B h w C"], *, keys=None, hyper=None
  ) -> Float[Array, " B"]:
    """Returns the squared error of each image: the mean over its hidden patches and
    their pixels, each patch scaled to mean 0 and variance 1 (so that an error of 1 is
    that of a guess of the mean).

    Args:
      images: normalised pixels.
      keys: one random key per image, [B]: which patches are hidden, and the encoder's
        dropout and drop path. None: the last patches are hidden, without noise.
      hyper: as in the ViT.
    """
    order = self.order(len(images), keys)
    visible, hidden = order[:, : self.visible], order[:, self.visible :]
    seen = self.encode(images, visible, keys=keys, hyper=hyper)
    cells = patches.patchify(images.astype(jnp.float32), self.geometry)
    if cells.shape[-1] == 1:
      raise ConfigError(
        'loss.name="mae" with model.patch=1 on grey images leaves nothing to rebuild: '
        "each patch is scaled by itself; try model.patch=2"
      )
    targets = scaled(cells)
    guesses = self.decoder(seen, order, targets.shape[-1])
    errors = jnp.square(_take(guesses, hidden) - _take(targets, hidden))
    return errors.mean(axis=(1, 2))

  def order(self, batch: int, keys=None) -> Int[Array, "B N"]:
    """Returns the grid numbers of the patches, the visible ones first."""
    tokens = self.geometry.tokens
    if keys is None:
      return jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    keys = _part(keys, MASK)
    return jax.vmap(lambda key: jax.random.permutation(key, tokens))(keys)

  def encode(
    self, images, visible: Int[Array, "B V"], *, keys=None, hyper=None
  ) -> Float[Array, "B T D"]:
    """Returns class token, registers and visible patches after the last norm."""
    tokens = _take(self.encoder.embed(images), visible)
    if keys is not None:
      keys = _part(keys, ENCODER)
    return self.encoder.encode(tokens, keys=keys, hyper=hyper, places=visible)


class Decoder(nn.Module):
  """Blocks over all places: what the encoder says of the visible ones, one learned
  token for the hidden ones, and fixed 2-D positions; then a linear map to pixels."""

  config: config_lib.Model
  geometry: patches.Geometry

  @nn.compact
  def __call__(
    self, seen: Float[Array, "B T D"], order: Int[Array, "B N"], pixels: int
  ) -> Float[Array, "B N pixels"]:
    c, (batch, tokens) = self.config, order.shape
    prefix = (c.pool == "cls") + c.registers
    x = vit.Linear(c.width, c.dtype, name="embed")(seen)
    mask = self.param("mask_token", nn.initializers.normal(0.02), (1, c.width))
    missing = tokens - (x.shape[1] - prefix)
    mask = jnp.broadcast_to(mask.astype(x.dtype), (batch, missing, c.width))
    # From visible first to the places of the grid.
    grid = _take(
      jnp.concatenate([x[:, prefix:], mask], axis=1), jnp.argsort(order, axis=1)
    )
    table = jnp.asarray(positions.sincos2d(self.geometry.grid, c.width), grid.dtype)
    x = jnp.concatenate([x[:, :prefix], grid + table[None]], axis=1)
    scale = vit.traceable(c)["scale"]
    for i in range(c.depth):
      x = vit.Block(c, name=f"block_{i}")(x, scale)
    x = vit.LayerNorm(name="norm")(x[:, prefix:])
    return vit.Linear(pixels, "float32", name="pixels")(x)


def visible_patches(tokens: int, mask_ratio: float) -> int:
  """Returns how many of so many patches stay visible.

  Raises:
    ConfigError: none of them, or all.
  """
  hidden = round(mask_ratio * tokens)
  if not 0 < hidden < tokens:
    raise ConfigError(
      f"loss.mask_ratio={mask_ratio:g} hides {hidden} of {tokens} patches; expected at "
      "least one hidden and one visible: try another loss.mask_ratio or a smaller "
      "model.patch"
    )
  return tokens - hidden


def decoder_config(encoder: config_lib.Model) -> config_lib.Model:
  """Returns the sizes of the decoder: half the width of the encoder (up to the next
  multiple of its heads and of 4, for the position table), two blocks, no noise, the
  usual scale of scores."""
  unit = math.lcm(encoder.heads, 4)
  return dataclasses.replace(
    encoder,
    scale="rsqrt",
    width=math.ceil(encoder.width / 2 / unit) * unit,
    depth=DECODER_BLOCKS,
    positions="sincos2d",
    layer_scale=None,
    dropout=0.0,
    drop_path=0.0,
  )


def scaled(cells: Float[Array, "B N P"]) -> Float[Array, "B N P"]:
  """Gives the pixels of each patch mean 0 and variance 1."""
  mean, variance = cells.mean(-1, keepdims=True), cells.var(-1, keepdims=True)
  return (cells - mean) / jnp.sqrt(variance + FLAT)


def _take(x: Float[Array, "B N D"], places: Int[Array, "B V"]) -> Float[Array, "B V D"]:
  return jnp.take_along_axis(x, places[..., None], axis=1)


def _part(keys, number):
  return jax.vmap(jax.random.fold_in, (0, None))(keys, number)

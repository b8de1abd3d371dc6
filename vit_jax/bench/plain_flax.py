"""A vision transformer as one writes it first in Flax: `nn.MultiHeadDotProductAttention`
and nothing thought of but the figure. It is what our own has to beat."""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models import patches


class PlainViT(nn.Module):
  """Pre-norm ViT with a class token and learned positions.

  Attributes:
    geometry: where the patches lie.
    width, depth, heads, hidden, classes: sizes.
    dtype: of the computation.
  """

  geometry: patches.Geometry
  width: int
  depth: int
  heads: int
  hidden: int
  classes: int
  dtype: str = "float32"

  @nn.compact
  def __call__(self, images):
    g = self.geometry
    dtype = jnp.dtype(self.dtype)
    x = nn.Conv(self.width, tuple(g.patch), tuple(g.stride), g.pads, dtype=dtype)(
      images
    )
    x = x.reshape(x.shape[0], -1, self.width)
    cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
    cls = jnp.broadcast_to(cls, (x.shape[0], 1, self.width)).astype(dtype)
    x = jnp.concatenate([cls, x], 1)
    shape = (1, x.shape[1], self.width)
    positions = self.param("positions", nn.initializers.normal(0.02), shape)
    x = x + positions.astype(dtype)
    for _ in range(self.depth):
      y = nn.LayerNorm(dtype=dtype)(x)
      x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=dtype)(y)
      y = nn.LayerNorm(dtype=dtype)(x)
      y = nn.gelu(nn.Dense(self.hidden, dtype=dtype)(y))
      x = x + nn.Dense(self.width, dtype=dtype)(y)
    x = nn.LayerNorm(dtype=dtype)(x)
    return nn.Dense(self.classes)(x[:, 0])

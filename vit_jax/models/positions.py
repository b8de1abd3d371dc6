"""Fixed position codes and rotary angles, functions of the grid alone."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.config import Pair


def sincos1d(grid: Pair, width: int) -> np.ndarray:
  """Returns [tokens, width]: sine and cosine in turn, patches counted row by row.

  PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(the same): Vaswani et al. 2017.
  """
  place = np.arange(grid.height * grid.width)[:, None]
  angles = place / 10_000 ** (2 * np.arange(width // 2) / width)
  return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(place), width)


def sincos2d(grid: Pair, width: int) -> np.ndarray:
  """Returns [tokens, width]: sin x, cos x, sin y, cos y, a quarter of the width each.

  Angle of frequency i: place / 10000^(i / (width/4 - 1)), as in MoCo v3 (Chen et al.
  2021) and the ViT baselines of Beyer et al. 2022.
  """
  quarter = width // 4
  omega = 10_000 ** -(np.arange(quarter) / max(1, quarter - 1))
  y, x = (axis.reshape(-1, 1) * omega for axis in np.mgrid[: grid.height, : grid.width])
  return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)


FIXED = {"sincos1d": sincos1d, "sincos2d": sincos2d}


def rope_angles(grid: Pair, channels: int, base: float = 100.0) -> np.ndarray:
  """Returns rotary angles [tokens, channels / 2]: the first half of them follow the
  row, the others the column (axial RoPE, Heo et al. 2024; frequencies base^-(i/n))."""
  quarter = channels // 4
  omega = base ** -(np.arange(quarter) / quarter)
  y, x = (axis.reshape(-1, 1) * omega for axis in np.mgrid[: grid.height, : grid.width])
  return np.concatenate([y, x], axis=1)


def rotate(
  x: Float[Array, "B T H d"], angles: Float[Array, "b T half"]
) -> Float[Array, "B T H d"]:
  """Turns channel pairs (i, i + d/2) of x by the angles (Su et al. 2021)."""
  cos, sin = (f(angles)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )

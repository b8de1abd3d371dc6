"""What training adds at random: dropout and skipped residual branches.

Every example draws from its own key, so the result does not depend on how a batch is
cut over devices or micro-batches. Rates may be traced.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Noise(NamedTuple):
  """Keys and rates of one part of the model.

  Attributes:
    keys: one key per example, [B].
    dropout: share of values set to 0.
    drop_path: probability that an example skips a residual branch.
  """

  keys: Array
  dropout: Array | float
  drop_path: Array | float

  def of(self, part) -> "Noise":
    """Returns independent noise for the part with this number."""
    return self._replace(keys=jax.vmap(jax.random.fold_in, (0, None))(self.keys, part))


def dropout(x: Float[Array, "B ..."], noise: Noise) -> Float[Array, "B ..."]:
  """Sets values to 0 with probability `dropout` and rescales the others."""
  keep = 1 - jnp.asarray(noise.dropout, jnp.float32)
  kept = jax.vmap(lambda key: jax.random.bernoulli(key, keep, x.shape[1:]))(noise.keys)
  return _rescaled(x, kept, keep)


def drop_path(x: Float[Array, "B ..."], noise: Noise) -> Float[Array, "B ..."]:
  """Sets whole examples to 0 with probability `drop_path` and rescales the others
  (stochastic depth, Huang et al. 2016)."""
  keep = 1 - jnp.asarray(noise.drop_path, jnp.float32)
  kept = jax.vmap(lambda key: jax.random.bernoulli(key, keep))(noise.keys)
  kept = kept.reshape(-1, *[1] * (x.ndim - 1))
  return _rescaled(x, kept, keep)


def _rescaled(x, kept, keep):
  """In half types the factor itself is not rounded: 0.999 would become 1."""
  return jnp.where(kept, x / keep, 0).astype(x.dtype)

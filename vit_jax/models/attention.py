"""Attention operators, one signature, arrays in the order B H N d.

    operator(q, k, v, *, scale) -> mixed

q [B H N d] asks, k [B H M d] answers, v [B H M d] is what is handed over; `scale`
multiplies the scores (a number or a traced scalar, not differentiated). Softmax is
taken in float32 whatever the type of the inputs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def weights(
  q: Float[Array, "B H N d"], k: Float[Array, "B H M d"], *, scale
) -> Float[Array, "B H N M"]:
  """Returns the attention weights, float32; each row sums to 1."""
  scores = jnp.einsum("bhnd,bhmd->bhnm", q, k, preferred_element_type=jnp.float32)
  return jax.nn.softmax(scores * scale, axis=-1)


def dense(q, k, v, *, scale):
  """Forms all weights: softmax(q k^T scale) v (Vaswani et al. 2017)."""
  mixed = weights(q, k, scale=scale).astype(v.dtype)
  return jnp.einsum("bhnm,bhmd->bhnd", mixed, v)


def fused(q, k, v, *, scale):
  """`jax.nn.dot_product_attention`: flash attention where the device has it."""
  # It has no place for a traced scale, so the scale goes into the queries.
  q = q * jnp.asarray(scale, q.dtype)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  return jax.nn.dot_product_attention(q, k, v, scale=1.0).swapaxes(1, 2)


OPERATORS = {"dense": dense, "fused": fused}

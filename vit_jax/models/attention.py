"""Attention operators, one signature, arrays in the order B H N d.

    operator(q, k, v, *, scale) -> mixed

q [B H N d] asks, k [B H M d] answers, v [B H M d] is what is handed over; `scale`
multiplies the scores (a number or a traced scalar). Softmax is taken in float32 whatever
the type of the inputs. `dense` has a backward pass of its own, so that `jax.grad` goes
through it (any number of times), `jax.jvp` does not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def weights(
  q: Float[Array, "B H N d"], k: Float[Array, "B H M d"], *, scale
) -> Float[Array, "B H N M"]:
  """Returns the attention weights, float32; each row sums to 1."""
  return jax.nn.softmax(_scores(_scaled(q, scale), k), axis=-1)


def dense(q, k, v, *, scale):
  """Forms all weights: softmax(q k^T scale) v (Vaswani et al. 2017)."""
  return _mix(_scaled(q, scale), k, v)


def fused(q, k, v, *, scale):
  """`jax.nn.dot_product_attention` with the implementation that JAX chooses."""
  # It has no place for a traced scale.
  q, k, v = (x.swapaxes(1, 2) for x in (_scaled(q, scale), k, v))
  return jax.nn.dot_product_attention(q, k, v, scale=1.0).swapaxes(1, 2)


def _scaled(q, scale):
  """Scales the queries: N x d products in place of N x M, rounded once in half types."""
  return (q * jnp.asarray(scale, jnp.float32)).astype(q.dtype)


def _scores(q, k):
  return jnp.einsum("bhnd,bhmd->bhnm", q, k, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _mix(q, k, v):
  """Returns softmax(q k^T) v."""
  return _mix_forward(q, k, v)[0]


def _mix_forward(q, k, v):
  """Keeps the weights before their division by the row sums: the division is then one
  of N x d, not of N x M numbers, here and in the backward pass."""
  scores = _scores(q, k)
  # Rounded before they are summed: the rows of the backward pass then sum to 0 in half
  # types too, whatever the keys have in common.
  raised = jnp.exp(scores - scores.max(-1, keepdims=True)).astype(v.dtype)
  total = raised.sum(-1, keepdims=True, dtype=jnp.float32)
  mixed = jnp.einsum("bhnm,bhmd->bhnd", raised, v, preferred_element_type=jnp.float32)
  mixed = mixed / total
  return mixed.astype(v.dtype), (q, k, v, raised, total, mixed)


def _mix_backward(kept, gradient):
  """With A = R / t (R `raised`, t `total`) and G = dO / t: dV = R^T G and, since the
  softmax takes dA to A (dA - rowsum(A dA)), dS = R (G V^T - rowsum(G O))."""
  q, k, v, raised, total, mixed = kept
  share = (gradient.astype(jnp.float32) / total).astype(v.dtype)
  mean = (share.astype(jnp.float32) * mixed).sum(-1, keepdims=True)
  dv = _over_queries(raised, share)
  dscores = (raised * (_scores(share, v) - mean)).astype(q.dtype)
  dq = jnp.einsum("bhnm,bhmd->bhnd", dscores, k)
  return dq, _over_queries(dscores, q), dv


def _over_queries(weights, x):
  """Returns weights^T x, [B H M d]. The product is made with its last axes exchanged:
  XLA on a CPU is up to twice as fast at this form."""
  return jnp.einsum("bhnd,bhnm->bhdm", x, weights).swapaxes(2, 3)


_mix.defvjp(_mix_forward, _mix_backward)


OPERATORS = {"dense": dense, "fused": fused}

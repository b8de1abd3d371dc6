"""Attention operators, one signature, arrays in the order B N H d.

    operator(q, k, v, *, scale) -> mixed

q [B N H d] asks, k [B M H d] answers, v [B M H d] is what is handed over; `scale`
multiplies the scores (a number or a traced scalar). Softmax is taken in float32 whatever
the type of the inputs. `dense` and `chunked` have backward passes of their own, so that
`jax.grad` goes through them (any number of times), `jax.jvp` does not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import ops

# Weights that `chunked` forms at a time: 2 MiB, which stay in a cache.
BLOCK = 2**19


def weights(
  q: Float[Array, "B N H d"], k: Float[Array, "B M H d"], *, scale
) -> Float[Array, "B H N M"]:
  """Returns the attention weights, float32; each row sums to 1."""
  return jax.nn.softmax(
    _scores(_heads_first(_scaled(q, scale)), _heads_first(k)), axis=-1
  )


def dense(q, k, v, *, scale):
  """Forms all weights: softmax(q k^T scale) v (Vaswani et al. 2017)."""
  return _mix(_scaled(q, scale), k, v)


def chunked(q, k, v, *, scale):
  """Exact, by blocks of rows: one block of the weights at a time is formed, here and once
  more in the backward pass, so that memory is linear in N (the idea of Dao et al. 2022;
  whole rows fit, so that no running sums are needed)."""
  return _mix_blocks(_scaled(q, scale), k, v)


def fused(q, k, v, *, scale):
  """`jax.nn.dot_product_attention` with the implementation that JAX chooses."""
  # It has no place for a traced scale.
  return jax.nn.dot_product_attention(_scaled(q, scale), k, v, scale=1.0)


def _scaled(q, scale):
  """Scales the queries: N x d products in place of N x M, rounded once in half types."""
  return (q * jnp.asarray(scale, jnp.float32)).astype(q.dtype)


def _heads_first(x):
  return x.swapaxes(1, 2)


def _scores(q, k):
  return jnp.einsum("bhnd,bhmd->bhnm", q, k, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _mix(q, k, v):
  """Returns softmax(q k^T) v."""
  return _mix_forward(q, k, v)[0]


def _mix_forward(q, k, v):
  """Keeps the weights before their division by the row sums: the division is then one
  of N x d, not of N x M numbers, here and in the backward pass."""
  q, k, v = map(_heads_first, (q, k, v))
  mixed, raised, total, _ = _attend(q, k, v)
  mixed = _heads_first(mixed)
  return mixed.astype(v.dtype), (q, k, v, raised, total, mixed)


def _attend(q, k, v):
  """Returns, heads first, the mixed values in float32, the weights before their division
  by the row sums, those sums, and the largest score of each row."""
  scores = _scores(q, k)
  highest = scores.max(-1, keepdims=True)
  # Rounded before they are summed: the rows of the backward pass then sum to 0 in half
  # types too, whatever the keys have in common.
  raised = jnp.exp(scores - highest).astype(v.dtype)
  total = raised.sum(-1, keepdims=True, dtype=jnp.float32)
  mixed = jnp.einsum("bhnm,bhmd->bhnd", raised, v, preferred_element_type=jnp.float32)
  return mixed / total, raised, total, highest


def _mix_backward(kept, gradient):
  """With A = R / t (R `raised`, t `total`) and G = dO / t: dV = R^T G and, since the
  softmax takes dA to A (dA - rowsum(A dA)), dS = R (G V^T - rowsum(G O))."""
  q, k, v, raised, total, mixed = kept
  wide = gradient.astype(jnp.float32)
  # Of `total` itself the compiler would keep what it broadcast in the forward pass.
  share = (wide / ops.again(_heads_first(total), wide)).astype(v.dtype)
  mean = _heads_first((share.astype(jnp.float32) * mixed).sum(-1, keepdims=True))
  share = _heads_first(share)
  dv = _over_queries(raised, share)
  dscores = (raised * (_scores(share, v) - mean)).astype(q.dtype)
  dq = jnp.einsum("bhnm,bhmd->bhnd", dscores, k)
  return tuple(map(_heads_first, (dq, _over_queries(dscores, q), dv)))


def _over_queries(weights, x):
  """Returns weights^T x, [B H M d]. The product is made with its last axes exchanged:
  XLA on a CPU is up to twice as fast at this form."""
  return jnp.einsum("bhnd,bhnm->bhdm", x, weights).swapaxes(2, 3)


_mix.defvjp(_mix_forward, _mix_backward)


@jax.custom_vjp
def _mix_blocks(q, k, v):
  """Returns softmax(q k^T) v."""
  return _mix_blocks_forward(q, k, v)[0]


def _mix_blocks_forward(q, k, v):
  """Keeps of the weights the logarithm of each row's sum."""
  examples, rows = _block(q.shape, k.shape[1])

  def of_examples(part):
    q, k, v = part
    mixed, sums = jax.lax.map(lambda q: _mix_block(q, k, v), _cut_rows(q, rows))
    return _join_rows(mixed, q.shape[1]), sums

  parts = [_cut_examples(x, examples) for x in (q, k, v)]
  mixed, sums = jax.lax.map(of_examples, parts)
  return _join_examples(mixed), (q, k, v, sums)


def _mix_block(q, k, v):
  mixed, _, total, highest = _attend(*map(_heads_first, (q, k, v)))
  return _heads_first(mixed).astype(v.dtype), highest + jnp.log(total)


def _mix_blocks_backward(kept, gradient):
  q, k, v, sums = kept
  examples, rows = _block(q.shape, k.shape[1])

  def of_examples(part):
    *of_queries, k, v, sums = part

    def of_rows(totals, part):
      dq, *others = _unmix_block(*part, k, v)
      return jax.tree.map(jnp.add, totals, others), dq

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    queries = [_cut_rows(x, rows) for x in of_queries]
    (dk, dv), dq = jax.lax.scan(of_rows, zeros, (*queries, sums))
    return _join_rows(dq, q.shape[1]), dk.astype(k.dtype), dv.astype(v.dtype)

  parts = [_cut_examples(x, examples) for x in (q, gradient, k, v)]
  return tuple(map(_join_examples, jax.lax.map(of_examples, (*parts, sums))))


def _unmix_block(q, gradient, sums, k, v):
  """With A the weights and dA = dO V^T: dV = A^T dO and dS = A (dA - rowsum(A dA)), with
  the mean taken of the rounded weights, so that the rows of dS sum to 0."""
  q, gradient, k, v = map(_heads_first, (q, gradient, k, v))
  weights = jnp.exp(_scores(q, k) - sums).astype(v.dtype)
  wide, dweights = weights.astype(jnp.float32), _scores(gradient, v)
  mean = (wide * dweights).sum(-1, keepdims=True) / wide.sum(-1, keepdims=True)
  dscores = (wide * (dweights - mean)).astype(q.dtype)
  dv = _over_queries(weights, gradient)
  dq = jnp.einsum("bhnm,bhmd->bhnd", dscores, k)
  return tuple(map(_heads_first, (dq, _over_queries(dscores, q), dv)))


_mix_blocks.defvjp(_mix_blocks_forward, _mix_blocks_backward)


def _block(shape, keys: int) -> tuple[int, int]:
  """Returns how many examples and how many of their queries share a block of weights,
  of at most `BLOCK` numbers (or one row)."""
  batch, queries, heads, _ = shape
  rows = max(1, BLOCK // (heads * keys))
  if rows < queries:
    return 1, -(-queries // -(-queries // rows))
  most = rows // queries
  return max(n for n in range(1, most + 1) if batch % n == 0), queries


def _cut_examples(x, size):
  """Returns [B ...] as [B / size, size, ...]. Dealt out in turn: where B is cut over
  devices each keeps its own, if `size` is a multiple of their number; otherwise examples
  are moved, which costs time."""
  return x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1)


def _join_examples(x):
  return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _cut_rows(x, size):
  """Returns [b N ...] as [N / size, b, size, ...], zeros added at the end."""
  batch, count, *rest = x.shape
  missing = -count % size
  x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * len(rest)))
  return x.reshape(batch, -1, size, *rest).swapaxes(0, 1)


def _join_rows(x, count):
  x = x.swapaxes(0, 1)
  return x.reshape(len(x), -1, *x.shape[3:])[:, :count]


OPERATORS = {"dense": dense, "chunked": chunked, "fused": fused}

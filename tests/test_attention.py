"""Attention operators against NumPy in float64, and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from close import assert_trees_close, drawn, quick_jit

from vit_jax.models import attention

# Those with a backward pass of their own.
EXACT = ["dense", "chunked"]


@pytest.mark.parametrize(
  "dtype, most", [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3), (jnp.float32, 1e-5)]
)
@pytest.mark.parametrize("common", [0.0, 4.0])
@pytest.mark.parametrize("operator", EXACT)
def test_gradients_of_attention(monkeypatch, operator, dtype, most, common):
  """Against NumPy in float64, also where all keys and values have much in common: the
  gradient of the scores has rows that sum to 0, so that this part must cancel."""
  shift = {0: 0, 1: common, 2: common, 3: 0}
  arrays = [drawn(1, 2, 33, 16, seed=s) + shift[s] for s in range(4)]
  q, k, v, up = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in arrays)
  scores = 0.25 * q @ k.swapaxes(2, 3)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  dweights = up @ v.swapaxes(2, 3)
  dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
  expected = {
    "q": 0.25 * dscores @ k,
    "k": 0.25 * dscores.swapaxes(2, 3) @ q,
    "v": weights.swapaxes(2, 3) @ up,
  }
  q, k, v, up = (jnp.asarray(a.swapaxes(1, 2), dtype) for a in (q, k, v, up))
  monkeypatch.setattr(attention, "BLOCK", 2 * 33 * 10)  # blocks of ten rows
  call = attention.OPERATORS[operator]
  _, back = jax.vjp(lambda *x: call(*x, scale=0.25), q, k, v)
  for found, (name, value) in zip(back(up), expected.items()):
    assert found.dtype == dtype
    error = np.linalg.norm(np.asarray(found, np.float64).swapaxes(1, 2) - value)
    assert error < most * np.linalg.norm(value), name


@pytest.mark.parametrize("operator", EXACT)
def test_gradient_of_the_scale(operator):
  q, k, v = (jnp.asarray(drawn(1, 2, 5, 8, seed=s)) for s in range(3))

  def loss(scale):
    return jnp.sin(attention.OPERATORS[operator](q, k, v, scale=scale)).sum()

  step = 1e-2
  slope = (loss(0.4 + step) - loss(0.4 - step)) / (2 * step)
  np.testing.assert_allclose(jax.grad(loss)(0.4), slope, rtol=1e-3)


@pytest.mark.parametrize("other", ["chunked", "fused"])
@pytest.mark.parametrize(
  "batch, queries, keys, block",
  [
    (6, 17, 17, 2**19),  # all at once
    (6, 17, 17, 2 * 17 * 17 * 4),  # three examples at a time: of 4, the divisor below
    (6, 17, 17, 2 * 17 * 5),  # five rows at a time, three missing in the last block
    (4, 1, 9, 2**19),  # one query, as in an attention pool
    (2, 5, 5, 1),  # a row at a time
  ],
)
def test_operators_agree_with_dense(monkeypatch, other, batch, queries, keys, block):
  """Values and gradients of queries, keys and values."""
  monkeypatch.setattr(attention, "BLOCK", block)
  q = jnp.asarray(drawn(batch, queries, 2, 8))
  k, v = (jnp.asarray(drawn(batch, keys, 2, 8, seed=s)) for s in (1, 2))

  def found(operator):
    def loss(q, k, v):
      out = operator(q, k, v, scale=jnp.float32(0.4))
      return jnp.sin(out).sum(), out

    return quick_jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

  expected = found(attention.OPERATORS["dense"])
  assert_trees_close(found(attention.OPERATORS[other]), expected, 1e-5)


def test_chunked_attention_serves_members():
  """Under `vmap`, as members side by side are."""
  q, k, v = (jnp.asarray(drawn(3, 2, 5, 2, 4, seed=s)) for s in range(3))

  def gradients(operator):
    def loss(q, k, v):
      return jnp.sin(operator(q, k, v, scale=0.5)).sum()

    return quick_jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(q, k, v)

  assert_trees_close(gradients(attention.chunked), gradients(attention.dense), 1e-5)


@pytest.mark.parametrize("operator", EXACT)
def test_gradients_of_gradients(monkeypatch, operator):
  """Against plain JAX."""
  monkeypatch.setattr(attention, "BLOCK", 2 * 5 * 3)
  q, k, v = (jnp.asarray(drawn(2, 5, 2, 4, seed=s)) for s in range(3))

  def plain(q, k, v, scale):
    weights = attention.weights(q, k, scale=scale)
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v)

  def second(call):
    def loss(q):
      return jnp.sin(call(q, k, v, scale=0.5)).sum()

    return quick_jit(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()))(q)

  found = second(attention.OPERATORS[operator])
  np.testing.assert_allclose(found, second(plain), atol=1e-5)


@pytest.mark.parametrize("operator, whole", [("dense", True), ("chunked", False)])
def test_no_whole_matrix_of_weights_in_the_program(monkeypatch, operator, whole):
  """Neither forwards nor backwards has an array 97 x 97, but a block of rows of it."""
  monkeypatch.setattr(attention, "BLOCK", 2 * 97 * 10)
  arrays = [jax.ShapeDtypeStruct((1, 97, 2, 4), jnp.float32)] * 3

  def loss(q, k, v):
    return jnp.sin(attention.OPERATORS[operator](q, k, v, scale=0.5)).sum()

  program = quick_jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()
  assert ("97,97]" in program) == whole
  assert ("10,97]" in program) != whole


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("operator", sorted(attention.OPERATORS))
def test_large_scores_are_finite_in_half(dtype, operator):
  """Scores of 100 * 100 * 32 = 320,000, above what float16 can hold."""
  q = jnp.asarray(100 * np.sign(drawn(1, 4, 2, 32)), dtype)
  out = attention.OPERATORS[operator](q, q, q, scale=1.0)
  assert out.dtype == dtype
  # Each token attends to itself alone.
  np.testing.assert_allclose(out.astype(jnp.float32), q.astype(jnp.float32), rtol=0.01)

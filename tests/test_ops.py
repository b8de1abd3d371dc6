"""Operations with backward passes of their own, against the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
from close import assert_trees_close, drawn, quick_jit
from scipy.special import expit

from vit_jax.models import ops


def test_matmul_has_the_gradient_of_a_product():
  """Alone and for several members at once."""
  x, kernel = jnp.asarray(drawn(3, 2, 5, 4)), jnp.asarray(drawn(3, 4, 6, seed=1))

  def gradients(product):
    def loss(x, kernel):
      return jnp.sin(product(x, kernel)).sum()

    return quick_jit(jax.vmap(jax.grad(loss, (0, 1))))(x, kernel)

  assert_trees_close(gradients(ops.matmul), gradients(jnp.matmul), 1e-5)


def test_gelu_matmul_against_numpy():
  """Value and gradients in float64: GELU(x) = x s, s = sigmoid(2 u)."""
  x, kernel, up = drawn(2, 5, 6), drawn(6, 3, seed=1), drawn(2, 5, 3, seed=2)
  wide, k, g = (np.asarray(a, np.float64) for a in (3 * x, kernel, up))
  u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
  share = expit(2 * u)
  slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * wide**2)
  hidden = wide * share
  expected = {
    "value": hidden @ k,
    "x": (g @ k.T) * (share + wide * share * (1 - share) * 2 * slope),
    "kernel": np.einsum("bni,bno->io", hidden, g),
  }
  value, back = jax.vjp(ops.gelu_matmul, jnp.asarray(3 * x), jnp.asarray(kernel))
  found = dict(zip(expected, (value, *back(jnp.asarray(up)))))
  assert_trees_close(found, expected, 1e-5)


def test_layer_norm_against_numpy():
  """Value and gradients in float64, of rows whose mean is not near 0."""
  x, up = 2 * drawn(2, 5, 16) + 7, drawn(2, 5, 16, seed=1)
  scale, bias = drawn(16, seed=2), drawn(16, seed=3)
  wide, s, g = (np.asarray(a, np.float64) for a in (x, scale, up))
  deviation = np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
  normal = (wide - wide.mean(-1, keepdims=True)) / deviation
  gs = g * s
  along = (gs * normal).mean(-1, keepdims=True)
  expected = {
    "value": normal * s + bias,
    "x": (gs - gs.mean(-1, keepdims=True) - normal * along) / deviation,
    "scale": (g * normal).sum((0, 1)),
    "bias": g.sum((0, 1)),
  }
  value, back = jax.vjp(ops.layer_norm, *map(jnp.asarray, (x, scale, bias)))
  found = dict(zip(expected, (value, *back(jnp.asarray(up)))))
  assert_trees_close(found, expected, 1e-5)


def test_layer_norm_of_a_large_mean():
  """E[x^2] - E[x]^2 in float32 gives -0.3 in place of -1.63 for this row."""
  row = 1000 + 0.01 * np.arange(16)
  expected = (row - row.mean()) / np.sqrt(row.var() + 1e-6)
  given = jnp.asarray(row[None], jnp.float32)
  found = ops.layer_norm(given, jnp.ones(16), jnp.zeros(16))
  np.testing.assert_allclose(found[0], expected, atol=1e-2)


def test_gradients_of_gradients():
  """Against the plain formulas."""
  x, kernel = jnp.asarray(drawn(3, 4)), jnp.asarray(drawn(4, 4, seed=1))
  scale, bias = jnp.asarray(drawn(4, seed=2)), jnp.asarray(drawn(4, seed=3))

  def second(norm, product):
    def loss(x):
      return jnp.sin(product(norm(x, scale[None], bias[None]), kernel)).sum()

    return quick_jit(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))(x)

  def plain_norm(x, scale, bias):
    rest = x - x.mean(-1, keepdims=True)
    return rest / jnp.sqrt((rest**2).mean(-1, keepdims=True) + 1e-6) * scale + bias

  found = second(lambda x, s, b: ops.layer_norm(x, s[0], b[0]), ops.gelu_matmul)
  plain = second(plain_norm, lambda x, k: jax.nn.gelu(x, approximate=True) @ k)
  np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)


def test_less_is_kept_for_the_backward_pass():
  """Of a chain of eight, by what the compiler plans: the inputs, and of one link at a
  time the rest. Where the compiler sees that the same is computed twice, it keeps that."""
  x, kernel = jnp.zeros((256, 64)), jnp.zeros((64, 64))

  def planned(operation):
    def loss(x, kernel):
      for _ in range(8):
        x = operation(x, kernel)
      return jnp.sin(x).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel).compile()
    return program.memory_analysis().temp_size_in_bytes / (8 * 4 * x.size)

  def plain(x, kernel):
    return jax.nn.gelu(x, approximate=True) @ kernel

  assert planned(ops.gelu_matmul) < 1.7
  assert planned(plain) > 2

"""Operations with backward passes of their own: plain formulas, less memory.

What autodiff keeps from the forward to the backward pass decides how much memory a step
needs. These keep their inputs and make the rest again. For `jax.grad`, any number of
times; not for `jax.jvp`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6  # of the variance in LayerNorm


@jax.custom_vjp
def matmul(x: Float[Array, "*b I"], kernel: Float[Array, "I O"]):
  """Returns x @ kernel, with the gradient of the kernel as one flat product."""
  return x @ kernel


def _matmul_forward(x, kernel):
  return x @ kernel, (x, kernel)


def _matmul_backward(kept, dy):
  x, kernel = kept
  return dy @ kernel.T, _kernel_gradient(x, dy)


def _kernel_gradient(x, dy):
  """Returns x^T dy, summed over all rows; made transposed unless it has fewer rows
  than columns: the form that XLA on a CPU is fastest at."""
  x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
  if x.shape[1] < dy.shape[1]:
    return x.T @ dy
  return jnp.einsum("ro,ri->oi", dy, x).T


matmul.defvjp(_matmul_forward, _matmul_backward)


def _gelu(x):
  return jax.nn.gelu(x, approximate=True)


@jax.custom_vjp
def gelu_matmul(x: Float[Array, "*b I"], kernel: Float[Array, "I O"]):
  """Returns GELU(x) @ kernel, GELU by its tanh form (Hendrycks and Gimpel 2016)."""
  return _gelu(x) @ kernel


def _gelu_matmul_forward(x, kernel):
  return gelu_matmul(x, kernel), (x, kernel)


def _gelu_matmul_backward(kept, dy):
  x, kernel = kept
  hidden, back = jax.vjp(_gelu, again(x, dy))
  return *back(dy @ kernel.T), _kernel_gradient(hidden, dy)


gelu_matmul.defvjp(_gelu_matmul_forward, _gelu_matmul_backward)


def _layer_norm(x, scale, bias):
  wide, rows = x.astype(jnp.float32), (1,) * (x.ndim - 1)
  rest = wide - wide.mean(-1, keepdims=True)
  normal = rest * jax.lax.rsqrt((rest * rest).mean(-1, keepdims=True) + EPSILON)
  return normal * scale.reshape(*rows, -1) + bias.reshape(*rows, -1)


@jax.custom_vjp
def layer_norm(
  x: Float[Array, "*b D"], scale: Float[Array, "D"], bias: Float[Array, "D"]
):
  """Returns LayerNorm over the last axis (Ba et al. 2016), float32.

  The variance takes two passes: E[x^2] - E[x]^2 loses all digits where the mean is large.
  """
  return _layer_norm(x, scale, bias)


def _layer_norm_forward(x, scale, bias):
  return _layer_norm(x, scale, bias), (x, scale, bias)


def _layer_norm_backward(kept, dy):
  x, scale, bias = kept
  # Equal to `scale` where that is finite, which the compiler cannot tell: otherwise it
  # broadcasts `scale` over all tokens in the forward pass, and keeps that.
  scale = jnp.minimum(scale, jnp.finfo(scale.dtype).max)
  _, back = jax.vjp(_layer_norm, again(x, dy), scale, bias)
  return back(dy)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def again(x, dy):
  """Returns x as something that exists only when dy does, row by row.

  What is computed of it is computed in the backward pass. Of x itself the compiler would
  see that it has the results already, and keep them from the forward pass (as it does in
  `jax.checkpoint` on a CPU, where XLA drops the barrier that should prevent it). That
  the sum below adds zeros it does not see.
  """
  return x + jnp.minimum(jnp.abs(dy[..., :1]), 0).astype(x.dtype)

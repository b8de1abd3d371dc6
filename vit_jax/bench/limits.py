"""What the machine can do at best, as contenders of the same race."""

from vit_jax.bench.race import Contender, Runner

SIDE = 2048
COPIED = 2**28  # bytes: past every cache


def product(dtype: str = "float32") -> Contender:
  """One large product of matrices a round; `facts["flops"]` of it."""
  return Contender(_product, dtype, needs=("jax",))


def copy() -> Contender:
  """One copy of a large array a round; `facts["bytes"]`, read and written."""
  return Contender(_copy, needs=("jax",))


def _product(dtype):
  import jax
  import jax.numpy as jnp

  a = jnp.full((SIDE, SIDE), 1 / SIDE, dtype)
  multiply = jax.jit(lambda a: a @ a)
  return Runner(lambda: multiply(a).block_until_ready(), {"flops": 2 * SIDE**3})


def _copy():
  import jax
  import jax.numpy as jnp

  a = jnp.ones(COPIED // 4, jnp.float32)
  # A sum with a constant, as the compiler would drop a bare copy; in place, as new
  # memory would have to be cleared first.
  add = jax.jit(lambda a: a + 1, donate_argnums=0)

  def go():
    nonlocal a
    a = add(a).block_until_ready()

  return Runner(go, {"bytes": 2 * COPIED})

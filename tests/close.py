"""Random arrays, quick compilation, and trees that are close."""

import functools

import jax
import numpy as np

# Compiling is what takes time here: without the optimizations of machine code, half.
quick_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def drawn(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_trees_close(one, two, atol):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=atol, atol=atol), one, two
  )

"""Four virtual CPU devices, and faults of shape, type or rank that raise."""

import os

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=4"
  # Compilation is most of the time of the tests; speed is not tested.
  + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

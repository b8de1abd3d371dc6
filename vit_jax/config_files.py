"""Files of the user that say what is to be done: get_config(), and get_sweep()."""

import importlib.util
import os
import pathlib
import types
from typing import Any

import ml_collections

from vit_jax import config
from vit_jax.config import Config, ConfigError


def read(path: str | os.PathLike) -> ml_collections.ConfigDict:
  """Returns what get_config() of a file returns, to be changed or parsed.

  Raises:
    ConfigError: no such file, no such function in it, or it fails.
  """
  return _call(load(path), "get_config", path)


def read_sweep(path: str | os.PathLike) -> tuple[Config, Any]:
  """Returns the base of a sweep, and its trials as overrides (`sweep.space`), or what is
  searched (`sweep.search.Search`).

  Raises:
    ConfigError: as of `read`.
  """
  module = load(path)
  base = config.parse(_call(module, "get_config", path))
  return base, _call(module, "get_sweep", path)


def load(path: str | os.PathLike) -> types.ModuleType:
  """Returns a file as a module, for what else it holds.

  Raises:
    ConfigError: no such file, or it fails.
  """
  path = pathlib.Path(path).expanduser()
  if path.suffix != ".py" or not path.is_file():
    raise ConfigError(f"{path}: no such file; expected a Python file")
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  return _guarded(lambda: (spec.loader.exec_module(module), module)[1], path)


def _call(module, name, path):
  function = getattr(module, name, None)
  if not callable(function):
    raise ConfigError(f"{path} has no {name}()")
  return _guarded(function, path)


def _guarded(function, path):
  """Calls what the user wrote; whatever it raises becomes one line."""
  try:
    return function()
  except ConfigError:
    raise
  except Exception as error:
    raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error

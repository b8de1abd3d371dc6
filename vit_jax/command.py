"""What the scripts share: flags to settings, errors to one line, exit codes.

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed: a bug, a full disk, a run that diverged |
| 2 | bad input: a flag, setting, file or folder that cannot be used |
| 75 | stopped by a signal, all saved that there was: queue the same command again |
| 130 | interrupted (Ctrl-C) where there is nothing to save, or a second time |
"""

import contextlib
import ctypes
import errno
import logging as native_logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from vit_jax import config as config_lib
from vit_jax.config import Config, ConfigError
from vit_jax.errors import Diverged, Stopped

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

# Flags that are defined here belong to the script that asked for them: its --help.
flags.disclaim_key_flags()

CONFIG_HELP = (
  "file with get_config(); change single values by --config.model.stride=2, "
  "--config.model.patch='(8, 12)', --config.train.length='30 epochs', "
  "--config.optim.ema=None"
)


def define_config() -> None:
  """Adds the flag --config, with --config.NAME=VALUE for every setting."""
  config_flags.DEFINE_config_file("config", None, CONFIG_HELP)


def define_settings() -> None:
  """Adds --config.NAME=VALUE for every setting, without a file to start from."""
  try:  # ml_collections looks at the arguments right here
    _check_names(sys.argv)
  except ConfigError as error:
    _fail(error)
  config_flags.DEFINE_config_dict("config", config_lib.default(), "change settings")


def changed_settings() -> dict[str, Any]:
  """Returns the settings that flags have changed, by dotted name."""
  return dict(config_flags.get_override_values(flags.FLAGS["config"]))


def parsed_config() -> Config:
  """Returns the configuration that the flags describe."""
  value = flags.FLAGS.config
  if value is None:
    raise ConfigError("--config is missing; try --config configs/digits.py")
  if not isinstance(value, ml_collections.ConfigDict):
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    raise ConfigError(
      f"--config {file}: no such file, or its get_config() fails; try --config "
      "configs/digits.py"
    )
  return config_lib.parse(value)


def define_run(split: bool = False) -> None:
  """Adds the flags that choose a checkpoint of a run."""
  flags.DEFINE_string("workdir", None, "run folder, or a step in its checkpoints/")
  flags.DEFINE_string("step", "latest", "latest, best, or a step number")
  flags.DEFINE_bool("ema", False, "take the moving average of the parameters")
  flags.DEFINE_string("member", None, "number or name of the member of a population")
  flags.DEFINE_string("out", None, "write the result to this file as well (JSON)")
  if split:
    flags.DEFINE_string("split", "test", "test, val or train")
    flags.DEFINE_string("data_dir", None, "folder of the data, if it has moved")
    flags.DEFINE_string(
      "pictures", None, "other data: a folder of CLASS/*.png, matched by class name"
    )


def required(name: str):
  """Returns a flag's value or says that it is missing."""
  value = flags.FLAGS[name].value
  if value is None:
    raise ConfigError(f"--{name} is missing; see --help")
  return value


def main(function: Callable[[Sequence[str]], None], doc: str) -> None:
  """Runs a script: `function(arguments that are not flags)`, and exits with a code."""
  sys.modules["__main__"].__doc__ = doc
  # Warnings only, a line each: the libraries below tell far more than a user reads.
  logging.set_verbosity(logging.WARNING)
  logging.get_absl_handler().setFormatter(
    native_logging.Formatter("%(levelname)s: %(message)s")
  )
  # Where one of many arrays cannot be read, Orbax raises that and leaves tasks behind,
  # which asyncio would report in tracebacks of their own.
  native_logging.getLogger("asyncio").setLevel(native_logging.CRITICAL)

  def guarded(arguments):
    try:
      function(arguments[1:])
    except Stopped as stop:
      _say(f"stopped: {stop}")
      sys.exit(STOPPED)
    except Diverged as error:
      _say(f"failed: {error}")
      sys.exit(FAILED)
    except BrokenPipeError:
      # Who read our output (head, say) has enough. Python would say so once more.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(FAILED)
    except OSError as error:
      if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        _say(f"failed: {error}")
        sys.exit(FAILED)
      _fail(error)
    except ConfigError as error:
      _fail(error)
    except KeyboardInterrupt:
      _say("interrupted")
      sys.exit(INTERRUPTED)

  app.run(guarded, flags_parser=_parse)


def _parse(arguments):
  try:
    _check_names(arguments)
    left = flags.FLAGS(arguments)
    for name in flags.FLAGS:  # settings say it themselves
      empty = flags.FLAGS[name].present and flags.FLAGS[name].value == ""
      if empty and not name.startswith("config."):
        raise ConfigError(f"--{name} is empty; leave it out or give a value")
    if _has_config_file() and flags.FLAGS.config is not None:
      parsed_config()
    return left
  except ConfigError as error:
    _fail(error)
  except flags.Error as error:
    # ml_collections puts the traceback of a config file in; its last line says why.
    head, trace, rest = str(error).partition("Traceback (most recent call last)")
    _fail(head + rest.strip().splitlines()[-1] if trace else error)
  except Exception as error:
    # A config file is a program of the user, which absl runs while it reads the flags.
    unknown = re.match(r"'?Key \"(\w+)\" does not exist", str(error))
    if unknown:
      hint = config_lib.nearest_setting(unknown[1])
      _fail(f"--config: unknown setting {unknown[1]!r}{hint}")
    _fail(f"--config: {type(error).__name__}: {error}")
  return None


def _has_config_file() -> bool:
  """Whether --config is a file: settings without one are checked with what they change,
  which the script knows."""
  return "config" in flags.FLAGS and flags.FLAGS["config"].default is None


def _check_names(arguments):
  """Refuses unknown settings by their whole name, which ml_collections does not."""
  known = config_lib.names()
  for argument in flags.FLAGS.read_flags_from_files(arguments[1:], force_gnu=False):
    name = argument.lstrip("-").split("=")[0].removeprefix("no")
    if argument.startswith("-") and name.startswith("config."):
      name = name.removeprefix("config.")
      if name not in known and not any(k.startswith(f"{name}.") for k in known):
        raise ConfigError(f"unknown setting {name!r}{config_lib.nearest(name, known)}")


def prepare_jax(deterministic: bool = False) -> None:
  """Sets what must be set before JAX starts: a cache of compiled programs (in
  $JAX_COMPILATION_CACHE_DIR or ~/.cache/vit_jax), repeatable GPU operations, and that
  the process keeps its memory between the calls of a program."""
  _keep_memory()
  if deterministic:
    flag = "--xla_gpu_deterministic_ops=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
  import jax

  if not jax.config.jax_compilation_cache_dir:
    cache = os.path.join(os.path.expanduser("~"), ".cache", "vit_jax", "compiled")
    jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def _keep_memory():
  """Lets the C library keep what is freed. On a CPU, XLA takes the memory of a program
  anew at each call, and by default every call hands hundreds of MiB back to the system,
  which clears them page by page for the next (docs/speed.md). Only glibc is asked."""
  arena_max, mmap_max, trim_threshold = -8, -4, -1  # of malloc.h
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)


def _say(text):
  print(text, file=sys.stderr, flush=True)


def _fail(error):
  text = " ".join(str(error).split())
  _say(f"error: {text}")
  sys.exit(BAD_INPUT)

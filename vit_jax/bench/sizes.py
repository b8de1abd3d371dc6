"""The models that are compared, as our own settings; peers are built from the same."""

import pathlib
import sys

from vit_jax import config, config_files
from vit_jax.config import Config, ConfigError

# Reference: 65 tokens. Overlap: the same patches at half the stride, 257 tokens.
_REFERENCE = {"data.image_size": 32, "data.batch_size": 128}
SIZES = {
  "reference": (_REFERENCE, 10),
  "overlap": (_REFERENCE | {"model.stride": 2, "model.pad": 1}, 10),
  "vit_s16": (
    {
      "data.image_size": 224,
      "data.batch_size": 8,
      "model.patch": 16,
      "model.width": 384,
      "model.depth": 12,
      "model.heads": 6,
    },
    1000,
  ),
  "vit_b16": (
    {
      "data.image_size": 224,
      "data.batch_size": 128,
      "model.patch": 16,
      "model.width": 768,
      "model.depth": 12,
      "model.heads": 12,
    },
    1000,
  ),
}
CHANNELS = 3
ROOT = pathlib.Path(__file__).parents[2]
TRAIN = str(ROOT / "scripts" / "train.py")


def make(name: str, changes=()) -> tuple[Config, int]:
  """Returns the configuration of a size, and its number of classes.

  Args:
    name: one of `SIZES`.
    changes: settings on top, by dotted name.

  Raises:
    ConfigError: no such size.
  """
  if name not in SIZES:
    raise ConfigError(f"--size={name}: expected one of {', '.join(SIZES)}")
  settings, classes = SIZES[name]
  fixed = {"data.name": "synthetic", "train.length": "100000 steps"}
  return config.override(Config(), fixed | settings | dict(changes)), classes


def recipe(name: str) -> Config:
  """Returns one of our recipes: a run that is timed as a whole."""
  return config.parse(config_files.read(_file(name)))


def train_command(name: str, **flags) -> list[str]:
  """Returns the command line that trains one of our recipes.

  Args:
    name: as of `recipe`.
    **flags: of scripts/train.py; `__` in a name stands for its dots.
  """
  given = (f"--{flag.replace('__', '.')}={value}" for flag, value in flags.items())
  return [sys.executable, TRAIN, f"--config={_file(name)}", *given]


def _file(name):
  return ROOT / "configs" / f"{name}.py"


def geometry(size: Config):
  """Returns where the patches of a size lie (`models.patches.Geometry`)."""
  from vit_jax import models  # and with it JAX, which not every contender needs

  return models.geometry(size.model, size.data.image_size)

"""Fetches and prepares a TFDS image set, or checks that every picture can be read.

  python scripts/prepare_data.py --dataset=cifar10 --data_dir=~/tensorflow_datasets
  python scripts/prepare_data.py --check --dataset=folder --data_dir=pets

Preparing writes array_record files, which training reads without TensorFlow
(`data.name="tfds:cifar10"`); the preparation itself needs it (extra `prepare`).

`--check` of a folder decodes every picture and names each that training would refuse;
of another set it loads the set once. The exit status is 0 where all is well, 1 where
not, and 2 where TensorFlow is missing.
"""

import importlib.util
import os
import sys

from absl import app, flags

from vit_jax import config
from vit_jax.data import datasets
from vit_jax.data import folder as folders

_DATASET = flags.DEFINE_string(
  "dataset", None, 'TFDS name, or with --check any data.name such as "folder".'
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder of the data; default: where the source usually lies."
)
_CHECK = flags.DEFINE_boolean("check", False, "Read everything, write nothing.")


def check(name: str, folder: str | None) -> int:
  """Prints what cannot be read; returns the exit status."""
  if name != "folder":
    found = datasets.load(config.Data(name=name, dir=folder), seed=0)
    print(f"{name}: {len(found.train)} training and {len(found.test)} test images")
    return 0
  if folder is None:
    raise config.ConfigError("--dataset=folder needs --data_dir")
  bad = folders.check(folder)
  for _, reason in bad:
    print(reason)
  print(f"{folder}: {len(bad)} pictures cannot be read")
  return 1 if bad else 0


def prepare(name: str, folder: str | None) -> int:
  """Downloads and writes array_record files; returns the exit status."""
  if importlib.util.find_spec("tensorflow") is None:
    print(
      "preparing a TFDS set needs TensorFlow: pip install 'vit_jax[prepare]' (training "
      "does not need it)",
      file=sys.stderr,
    )
    return 2
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(
      name.removeprefix("tfds:"), data_dir=folder, file_format="array_record"
    )
  except tfds.core.DatasetNotFoundError as error:
    raise config.ConfigError(str(error).split("\n", 1)[0]) from None
  builder.download_and_prepare()
  print(f"{name} is ready in {builder.data_dir}")
  return 0


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  folder = _DATA_DIR.value and os.path.expanduser(_DATA_DIR.value)
  run = check if _CHECK.value else prepare
  try:
    status = run(_DATASET.value, folder)
  except config.ConfigError as error:
    print(error, file=sys.stderr)
    status = 1
  sys.exit(status)


if __name__ == "__main__":
  flags.mark_flag_as_required("dataset")
  app.run(main)

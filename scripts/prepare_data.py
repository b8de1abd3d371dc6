"""Fetches and prepares a TFDS image set, or checks that every picture can be read.

  python scripts/prepare_data.py --dataset=cifar10 --data_dir=~/tensorflow_datasets
  python scripts/prepare_data.py --check --dataset=folder --data_dir=pets

Preparing writes array_record files, which training reads without TensorFlow
(`data.name="tfds:cifar10"`); the preparation itself needs it (extra `prepare`).

`--check` of a folder decodes every picture and names each that training would refuse;
of another set it loads the set once. The exit status is 0 where all is well, 1 where
pictures cannot be read, and 2 where the set or TensorFlow is not there.
"""

import importlib.util
import os
import sys

from absl import flags

from vit_jax import command, config
from vit_jax.data import datasets
from vit_jax.data import folder as folders

flags.DEFINE_string(
  "dataset", None, 'TFDS name, or with --check any data.name such as "folder"'
)
flags.DEFINE_string(
  "data_dir", None, "folder of the data; default: where the source usually lies"
)
flags.DEFINE_bool("check", False, "read everything, write nothing")


def check(name: str, folder: str | None) -> int:
  """Prints what cannot be read; returns the exit status."""
  if name != "folder":
    found = datasets.load(config.Data(name=name, dir=folder), seed=0)
    print(f"{name}: {len(found.train)} training and {len(found.test)} test images")
    return command.DONE
  if folder is None:
    raise config.ConfigError("--dataset=folder needs --data_dir")
  bad = folders.check(folder)
  for _, reason in bad:
    print(reason)
  print(f"{folder}: {len(bad)} pictures cannot be read")
  return command.FAILED if bad else command.DONE


def prepare(name: str, folder: str | None) -> int:
  """Downloads and writes array_record files; returns the exit status."""
  if importlib.util.find_spec("tensorflow") is None:
    raise config.ConfigError(
      "preparing a TFDS set needs TensorFlow: pip install -e '.[prepare]' (training "
      "does not need it)"
    )
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(
      name.removeprefix("tfds:"), data_dir=folder, file_format="array_record"
    )
  except tfds.core.DatasetNotFoundError as error:
    raise config.ConfigError(str(error).split("\n", 1)[0]) from None
  builder.download_and_prepare()
  print(f"{name} is ready in {builder.data_dir}")
  return command.DONE


def main(arguments):
  f = flags.FLAGS
  if arguments:
    raise config.ConfigError(f"unexpected {arguments}; the set is named by --dataset")
  name = command.required("dataset")
  folder = f.data_dir and os.path.expanduser(f.data_dir)
  sys.exit((check if f.check else prepare)(name, folder))


if __name__ == "__main__":
  command.main(main, __doc__)

"""Every file of configs/ parses; those whose data is not at hand run on generated files
of the real format."""

import importlib.util
import pathlib

import pytest
import test_cifar
import test_tfds

from vit_jax import config, train

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.py"))


def load(file):
  spec = importlib.util.spec_from_file_location(file.stem, file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_is_locked_and_parses(file):
  module = load(file)
  found = module.get_config()
  assert found.is_locked
  assert config.parse(found) != config.Config()
  # The docstring holds the command.
  assert f"--config configs/{file.name} " in module.__doc__


SMALL = {
  "data.batch_size": 4,
  "data.eval_batch_size": 4,
  "model.width": 48,
  "model.depth": 1,
  "model.heads": 2,
  "optim.warmup": "1 step",
  "train.length": "3 steps",
  "train.steps_per_call": 3,
}


def test_cifar10_on_files_of_its_format(tmp_path):
  files, _, _ = test_cifar.cifar_files("cifar10")
  test_cifar.write_tar(tmp_path / "cifar-10-binary.tar.gz", files)
  base = config.parse(load(ROOT / "configs" / "cifar10.py").get_config())
  small = config.override(base, SMALL | {"data.dir": str(tmp_path)})
  result = train.run(small, tmp_path / "run")
  assert 0 <= result["0"]["test/accuracy"] <= 1


class Imagenet2012(test_tfds.VitJaxTiny, skip_registration=True):
  VERSION = test_tfds.tfds.core.Version("5.1.0")
  counts = {"train": 40, "validation": 6}


def test_imagenet_on_a_prepared_set(tmp_path):
  builder = Imagenet2012(data_dir=tmp_path, file_format="array_record")
  builder.download_and_prepare()
  base = config.parse(load(ROOT / "configs" / "imagenet_s16.py").get_config())
  changes = {"data.dir": str(tmp_path), "data.image_size": 32, "data.val": 4}
  result = train.run(config.override(base, SMALL | changes), tmp_path / "run")
  assert {"val/accuracy", "test/accuracy"} <= set(result["0"])

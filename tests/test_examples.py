"""The examples run as they are written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax import ConfigError, evaluate

ROOT = Path(__file__).parent.parent


def test_own_parts(tmp_path):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
  done = subprocess.run(
    [
      sys.executable,
      str(ROOT / "examples" / "own_parts.py"),
      *("--workdir", str(tmp_path / "run"), "--length", "20 steps"),
    ],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  said = re.search(r"test accuracy (\S+), loss \S+", done.stdout)
  written = json.loads((tmp_path / "run/evaluations/test-20.json").read_text())
  assert said and float(said[1]) == round(written["accuracy"], 4)
  content = json.loads((tmp_path / "run/config.json").read_text())
  assert sorted(content["external"]) == ["data", "loss", "model"]
  with pytest.raises(ConfigError, match=r"from Python: .*model=\.\.\., loss=\.\.\."):
    evaluate.run(tmp_path / "run")

"""A sweep on a real Ray cluster of this machine."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny

from vit_jax import records
from vit_jax.config import ConfigError
from vit_jax.sweep import cluster, launch
from vit_jax.sweep.space import grid

pytest.importorskip("ray")
ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = str(ROOT / "scripts" / "sweep.py")


def test_resources_are_read():
  assert cluster.resources("CPU=2,GPU=0.5,TPU=4") == {"CPU": 2, "GPU": 0.5, "TPU": 4}
  assert cluster.resources("") == {}
  with pytest.raises(ConfigError, match="NAME=NUMBER"):
    cluster.resources("CPU")


def test_a_worker_that_is_killed_is_replaced(tmp_path):
  """Two groups at once; one worker is killed in mid-trial: both end as if unbroken."""
  cfg = tiny.make(train__length="300 steps", train__checkpoint_every="20 steps")
  space = grid("model.width", [8, 16])
  groups = launch.make(tmp_path / "ray", cfg, space)
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
  }
  process = subprocess.Popen(
    [sys.executable, SCRIPT, f"--workdir={tmp_path / 'ray'}", "--launcher=ray"],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  victim = launch.run_folder(tmp_path / "ray", groups[0].id)
  deadline = time.monotonic() + 300
  while not (victim / "checkpoints" / "20").exists():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.02)
  pid = records.read_status(victim)["pid"]
  os.kill(pid, signal.SIGKILL)
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  assert "trials: 2 done" in out
  assert records.read_status(victim)["pid"] != pid
  launch.make(tmp_path / "whole", cfg, space)
  # In processes too: this one has several devices, and sums differ by rounding.
  done = subprocess.run(
    [sys.executable, SCRIPT, f"--workdir={tmp_path / 'whole'}"],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  for group in groups:
    one, other = (
      launch.run_folder(tmp_path / name, group.id) for name in ("ray", "whole")
    )
    tiny.assert_same_runs(one, other, 300)


def test_more_than_the_cluster_has_is_refused(tmp_path):
  launch.make(tmp_path, tiny.make(), grid("seed", [0]))
  with pytest.raises(ConfigError, match="a group takes GPU=99, the cluster has"):
    cluster.run(tmp_path, None, {"GPU": 99})

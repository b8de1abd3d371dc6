"""Runs that stop, die, diverge, meet another run, or spread over processes."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny

from vit_jax import checkpoint, config, devices, lock, records, train
from vit_jax.config import ConfigError
from vit_jax.errors import Diverged, Stopped
from vit_jax.loop import Loop

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
import tiny
from vit_jax import config as config_lib
def get_config():
  config = config_lib.default()
  def put(node, values):
    for name, value in values.items():
      if isinstance(value, dict):
        put(getattr(node, name), value)
      else:
        setattr(node, name, value)
  put(config, config_lib.to_dict(tiny.make(**{changes})))
  return config
"""


def start(folder, changes, *flags, devices=1):
  """Starts scripts/train.py on the tiny run in a process of its own."""
  file = folder / "config.py"
  file.write_text(CONFIG.replace("{changes}", repr(changes)))
  env = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
  }
  script = str(ROOT / "scripts" / "train.py")
  return subprocess.Popen(
    [sys.executable, script, f"--config={file}", "--workdir=run", *flags],
    cwd=folder,
    env=env,
    stderr=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def wait_for_step(folder, step, process, limit=600):
  """Waits until a checkpoint of at least this step is there."""
  end = time.monotonic() + limit
  while time.monotonic() < end and process.poll() is None:
    if any(s >= step for s in checkpoint.steps(folder / "run")):
      return
    time.sleep(0.02)
  raise AssertionError(process.communicate(timeout=5))


def final_state(cfg, folder):
  job = train.prepare(cfg)
  layout = devices.make(cfg, job.steps, 1)
  step, state, _ = checkpoint.newest_whole(folder, layout.abstract(job.hypers))
  return step, checkpoint.flatten(jax.device_get(state))


LONG = {
  "train__length": "400 steps",
  "train__checkpoint_every": "7 steps",
  "train__log_every": "10 steps",
  "optim__ema": 0.9,
  "model__dropout": 0.1,
}


def test_killed_and_stopped_equals_unbroken(tmp_path):
  """kill -9 in the middle, then SIGTERM, then to the end: the same bits and rows."""
  process = start(tmp_path, LONG)
  wait_for_step(tmp_path, 21, process)
  # Another process is refused while this one lives.
  with pytest.raises(lock.FolderInUse, match=str(process.pid)):
    train.run(tiny.make(**LONG), tmp_path / "run")
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  killed_at = max(checkpoint.steps(tmp_path / "run"))

  process = start(tmp_path, LONG)
  wait_for_step(tmp_path, killed_at + 7, process)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=600)
  assert process.returncode == 75, err
  assert "stopped: SIGTERM at step" in err
  assert records.read_status(tmp_path / "run")["state"] == "stopped"
  stopped_at = max(checkpoint.steps(tmp_path / "run"))
  assert killed_at < stopped_at < 400

  process = start(tmp_path, LONG)
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  assert "next: python scripts/evaluate.py --workdir" in out
  assert records.read_status(tmp_path / "run")["state"] == "done"

  folder = tmp_path / "unbroken"
  folder.mkdir()
  process = start(folder, LONG)
  process.communicate(timeout=600)
  cfg = tiny.make(**LONG)
  step, state = final_state(cfg, tmp_path / "run")
  other_step, other = final_state(cfg, tmp_path / "unbroken" / "run")
  assert step == other_step == 400
  for name in state:
    np.testing.assert_array_equal(state[name], other[name], err_msg=name)
  rows = [records.read(f / "run") for f in (tmp_path, tmp_path / "unbroken")]
  assert records.equal(*rows) == []


def test_divergence_keeps_the_last_good_checkpoint(tmp_path):
  cfg = tiny.make(
    optim__name="sgd",
    optim__lr=1e30,
    optim__warmup="6 steps",
    optim__clip_norm=None,
    optim__weight_decay=0.0,
    train__length="20 steps",
    train__checkpoint_every="1 step",
    train__steps_per_call=1,
  )
  with pytest.raises(Diverged, match=r"step \d+: loss .*\(examples \d+, ") as error:
    train.run(cfg, tmp_path)
  step = int(str(error.value).split()[1].rstrip(":"))
  assert max(checkpoint.steps(tmp_path)) == step - 1
  assert f"step {step - 1} is saved" in str(error.value)
  params = checkpoint.load_params(tmp_path)[0]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
  status = records.read_status(tmp_path)
  assert status["state"] == "failed" and "Diverged" in status["message"]
  assert status["step"] == step - 1


def test_divergence_at_once_says_that_nothing_was_saved(tmp_path):
  cfg = tiny.make(
    optim__name="sgd", optim__lr=1e30, optim__clip_norm=None, train__steps_per_call=10
  )
  with pytest.raises(Diverged, match="nothing was saved before") as error:
    train.run(cfg, tmp_path)
  step = int(str(error.value).split()[1].rstrip(":"))
  assert records.read_status(tmp_path)["step"] == step - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_stops(tmp_path, monkeypatch, number):
  """It is no failure, and the same call begins anew."""
  first_state = Loop._first_state
  # What a job in the background ignores, an earlier program may have set.
  before = signal.getsignal(signal.SIGTERM)
  interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)

  def signalled(loop):
    os.kill(os.getpid(), number)
    time.sleep(10)
    return first_state(loop)

  with monkeypatch.context() as patch:
    patch.setattr(Loop, "_first_state", signalled)
    try:
      with pytest.raises(Stopped if number == signal.SIGTERM else KeyboardInterrupt):
        train.run(tiny.make(), tmp_path)
    finally:
      signal.signal(signal.SIGINT, interrupt)
  status = records.read_status(tmp_path)
  assert status["state"] == "stopped" and status["step"] == 0
  assert signal.getsignal(signal.SIGTERM) == before
  train.run(tiny.make(), tmp_path)


def test_a_partial_start_from_nothing_is_told(caplog):
  train.prepare(tiny.make(init__partial=True))
  assert "the run starts from random parameters" in caplog.text


def test_steps_per_call_changes_no_bit(tmp_path):
  states = []
  for k in (1, 3, 10):
    folder = tmp_path / str(k)
    cfg = tiny.make(train__steps_per_call=k, model__dropout=0.1, optim__ema=0.9)
    train.run(cfg, folder)
    states.append((final_state(cfg, folder)[1], records.read(folder)))
  for state, rows in states[1:]:
    for name in state:
      np.testing.assert_array_equal(state[name], states[0][0][name], err_msg=name)
    assert records.equal(rows, states[0][1]) == []


def test_checkpoints_and_rows_come_when_they_should(tmp_path):
  cfg = tiny.make(
    train__checkpoint_every="2 steps",
    train__eval_every="5 steps",
    train__log_every="3 steps",
    train__keep=None,
    train__steps_per_call=4,
  )
  train.run(cfg, tmp_path)
  assert checkpoint.steps(tmp_path) == [2, 4, 6, 8, 10]
  rows = records.read(tmp_path)
  logged = [r["step"] for r in rows if "train/loss" in r]
  tested = [r["step"] for r in rows if "test/accuracy" in r]
  assert logged == [3, 6, 9, 10]
  assert tested == [5, 10]


def test_best_is_kept_apart_from_the_newest(tmp_path):
  cfg = tiny.make(
    data__val=0.2,
    train__best_metric="val/loss",
    train__eval_every="1 step",
    train__checkpoint_every="1 step",
    train__keep=2,
    optim__lr=3.0,
    optim__name="sgd",
    optim__warmup="0 steps",
  )
  train.run(cfg, tmp_path)
  rows = {r["step"]: r["val/loss"] for r in records.read(tmp_path)}
  best = min(rows, key=rows.get)
  assert best < 9  # this learning rate makes it worse in the end
  assert checkpoint.steps(tmp_path) == sorted({best, 9, 10})
  _, path = checkpoint.find(tmp_path, "best")
  assert path.name == str(best)


def test_other_settings_are_refused_in_an_old_folder(tmp_path, capsys):
  train.run(tiny.make(), tmp_path)
  with pytest.raises(ConfigError, match="optim.lr was 0.01, is 0.5") as error:
    train.run(tiny.make(optim__lr=0.5), tmp_path)
  assert "--workdir" in str(error.value)
  with pytest.raises(ConfigError, match=r"members were 0 \{\}, are .*'seed': 3"):
    train.run(tiny.make(), tmp_path, members=[{"seed": 3}, {"seed": 4}])
  with pytest.raises(ConfigError, match="model.patch was 4x4, is 2x2"):
    train.run(tiny.make(model__patch=2), tmp_path)
  # Settings that change no number may differ; a finished run stays as it is.
  capsys.readouterr()
  result = train.run(tiny.make(train__parallel="pmap"), tmp_path)
  assert 0 <= result["0"]["test/accuracy"] <= 1
  assert "is done: 10 steps, nothing left to train" in capsys.readouterr().err


def test_a_start_that_failed_leaves_no_claim(tmp_path):
  with pytest.raises(ConfigError, match="not a run folder"):
    train.run(tiny.make(init__source=str(tmp_path / "none")), tmp_path / "run")
  assert (tmp_path / "run" / "config.json").exists()
  short = tiny.make(train__length="1 step", optim__warmup="0 steps")
  train.run(short, tmp_path / "run")
  # What only informs may be lost.
  (tmp_path / "run" / "environment.json").write_text("")
  train.run(short, tmp_path / "run")
  assert json.loads((tmp_path / "run" / "environment.json").read_text())


def test_other_data_is_refused(tmp_path):
  import dataclasses

  from vit_jax.data import datasets

  cfg = tiny.make()
  data = datasets.load(cfg.data, 0)
  train.run(cfg, tmp_path, data=data)
  with pytest.raises(ConfigError, match="fingerprint"):
    train.run(cfg, tmp_path, data=dataclasses.replace(data, fingerprint="0" * 64))


def test_streamed_equals_resident(tmp_path):
  """The same images read one by one through Grain give the same run."""
  import dataclasses

  from vit_jax.data import datasets

  class Lazy:
    def __init__(self, images):
      self._images, self.shape = images, images.shape

    def __len__(self):
      return len(self._images)

    def __getitem__(self, i):
      return self._images[i]

  cfg = tiny.make(augment__crop=1)
  data = datasets.load(cfg.data, 0)
  lazy = dataclasses.replace(
    data, train=dataclasses.replace(data.train, images=Lazy(data.train.images))
  )
  train.run(cfg, tmp_path / "resident", data=data)
  train.run(cfg, tmp_path / "streamed", data=lazy)
  a, b = (checkpoint.load_params(tmp_path / n)[0] for n in ("resident", "streamed"))
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    np.testing.assert_allclose(x, y, atol=1e-6)


def test_two_processes_then_one(tmp_path):
  """Two real processes train and save; one goes on; equal to one process all along."""
  changes = {"train__length": "20 steps", "optim__name": "sgd"}
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  both = [
    start(
      tmp_path,
      changes,
      f"--coordinator=localhost:{port}",
      "--processes=2",
      f"--process={i}",
      devices=2,
    )
    for i in range(2)
  ]
  wait_for_step(tmp_path, 5, both[0])
  for process in both:
    process.send_signal(signal.SIGTERM)
  errors = [p.communicate(timeout=600)[1] for p in both]
  codes = [p.returncode for p in both]
  assert set(codes) <= {0, 75}, errors
  process = start(tmp_path, changes, devices=1)
  _, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  cfg = tiny.make(**changes)
  train.run(cfg, tmp_path / "alone")
  _, state = final_state(cfg, tmp_path / "run")
  _, alone = final_state(cfg, tmp_path / "alone")
  for name in state:
    np.testing.assert_allclose(state[name], alone[name], atol=2e-6, err_msg=name)


def test_run_folder(tmp_path):
  cfg = tiny.make(optim__ema=0.9)
  train.run(cfg, tmp_path)
  content = json.loads((tmp_path / "config.json").read_text())
  assert config.parse(content["config"]) == cfg
  assert content["geometry"]["grid"] == [2, 2]
  environment = json.loads((tmp_path / "environment.json").read_text())
  assert {"jax", "flax", "orbax-checkpoint"} <= set(environment["packages"])
  for name in ("members.json", "status.json"):
    assert json.loads((tmp_path / name).read_text())["schema"] == 1
  last = records.read(tmp_path)[-1]
  assert {"train/loss", "test/accuracy", "test_ema/accuracy", "time/step"} <= set(last)

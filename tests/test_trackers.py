"""TensorBoard files, read back without the library that wrote them; W&B, stood in for."""

import math
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from vit_jax import records
from vit_jax.config import ConfigError

ROOT = pathlib.Path(records.__file__).parents[1]


def metrics(folder, start_step=0, members=None):
  return records.Metrics(folder, start_step=start_step, members=members)


def write_steps(folder, first, last, start_step=0):
  with metrics(folder, start_step) as writer:
    for step in range(first, last + 1):
      loss = math.nan if step == 4 else 1 / step
      writer.write(step, {"train/loss": loss, "test/Käfer\x85自行车": 0.1 * step})


def crc32c(content):
  """Bit by bit (Castagnoli polynomial, reflected), masked as in TFRecord files."""
  crc = 0xFFFFFFFF
  for byte in content:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder):
  """Returns the events of a folder, read without the library that wrote them."""
  from tensorboardX.proto import event_pb2

  found = []
  files = [f for f in epath.Path(folder).iterdir() if "tfevents" in f.name]
  for file in sorted(files, key=os.fspath):
    content = file.read_bytes()
    while content:
      header, (size,) = content[:8], struct.unpack("<Q", content[:8])
      body, rest = content[12 : 12 + size], content[12 + size :]
      assert struct.unpack("<I", content[8:12])[0] == crc32c(header)
      assert struct.unpack("<I", rest[:4])[0] == crc32c(body)
      found.append(event_pb2.Event.FromString(body))
      content = rest[4:]
  return found


def scalars(folder):
  """Returns sorted (tag, step, value) of what TensorBoard would show."""
  shown = []
  for event in sorted(events(folder), key=lambda e: e.wall_time):
    if event.HasField("session_log"):
      shown = [s for s in shown if s[1] < event.step]
    shown += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
  return sorted(shown)


def test_tensorboard_shows_the_same_after_a_resume_in_the_same_second(tmp_path):
  write_steps(tmp_path / "a", 1, 6)
  write_steps(tmp_path / "b", 1, 5)
  write_steps(tmp_path / "b", 4, 6, start_step=3)
  a, b = scalars(tmp_path / "a/tensorboard"), scalars(tmp_path / "b/tensorboard")
  np.testing.assert_equal(a, b)  # nan equals nan
  loss = {step: value for tag, step, value in b if tag == "train/loss"}
  assert list(loss) == [1, 2, 3, 4, 5, 6]
  assert loss[3] == np.float32(1 / 3) and math.isnan(loss[4])
  assert events(tmp_path / "a/tensorboard")[0].file_version == "brain.Event:2"
  write_steps(tmp_path / "b", 1, 1)
  assert {step for _, step, _ in scalars(tmp_path / "b/tensorboard")} == {1}


def test_tensorboard_has_a_folder_a_member(tmp_path):
  names = ["seed=0,patch=(4, 4)", "seed=1/../x", "ä" * 300]
  with metrics(tmp_path, members=names) as writer:
    for member in range(3):
      writer.write(1, {"train/loss": float(member), "big": 1e300}, member)
    writer.flush()
    folders = sorted((tmp_path / "tensorboard").iterdir())
    assert [f.name for f in folders] == [
      "000_seed=0,patch=_4,_4_",
      "001_seed=1_.._x",
      "002__",
    ]
    biggest = float(np.finfo(np.float32).max)
    for member, folder in enumerate(folders):
      assert scalars(folder) == [("big", 1, biggest), ("train/loss", 1, float(member))]


# ---------------------------------------------------------------- Weights & Biases


def test_torch_is_not_imported_for_tensorboard(tmp_path):
  """tensorboardX does where torch is there, which takes seconds."""
  (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
  code = """
import pathlib, sys
from vit_jax import trackers
board = trackers.TensorBoard(pathlib.Path("board"), None, 0)
board.write(1, {"train/loss": 0.5}, None)
board.close()
assert "torch" not in sys.modules  # so that it can be imported later
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert list((tmp_path / "board").iterdir())


def test_a_missing_wandb_is_said_in_one_line(tmp_path, monkeypatch):
  for module in (None, type(sys)("wandb")):  # absent; an empty folder of that name
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match="pip install wandb") as error:
      records.Metrics(tmp_path, start_step=0, members=None, wandb="project")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
  calls = []

  class Run:
    def define_metric(self, name, step_metric):
      calls.append((name, step_metric))

    def log(self, values):
      calls.append(values)

    def finish(self):
      calls.append("finish")

  def init(*, project, name, id, dir, resume):  # noqa: A002
    calls.append((project, name, id, dir, resume))
    return Run()

  module = type(sys)("wandb")
  module.init = init
  monkeypatch.setitem(sys.modules, "wandb", module)
  for start in (0, 1):
    with records.Metrics(
      tmp_path / "run",
      start_step=start,
      members=["a", "b"],
      tensorboard=False,
      wandb="p",
    ) as writer:
      writer.write(start + 1, {"train/loss": 0.5}, member=1)
  first, second = calls[:4], calls[4:]
  assert first[0] == second[0] and first[0][:2] == ("p", "run")
  assert first[0][2] == records.read_json(tmp_path / "run" / "wandb.json", 1)["id"]
  assert first[1:] == [("*", "step"), {"step": 1, "b/train/loss": 0.5}, "finish"]
  assert second[2] == {"step": 2, "b/train/loss": 0.5}


def test_wandb_works_offline(tmp_path):
  pytest.importorskip("wandb", reason="wandb is not installed")
  code = """
import sys
from vit_jax import records
with records.Metrics(sys.argv[1], start_step=0, members=None, wandb="p") as metrics:
  metrics.write(1, {"train/loss": 0.5})
"""
  process = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path / "run")],
    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
         "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    cwd=tmp_path,
  )  # fmt: skip
  assert process.returncode == 0
  name = records.read_json(tmp_path / "run" / "wandb.json", 1)["id"]
  assert (
    len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{name}.wandb"))) == 1
  )

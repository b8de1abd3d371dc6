"""The run folder in an object store, which is a memory here."""

import datetime
import math
import os
import pathlib
import struct
import time

import numpy as np
import pytest
from etils.epath import gpath
from fsspec.implementations.memory import MemoryFileSystem
from tensorboardX.proto import event_pb2

from vit_jax import lock, records


def metrics(folder, start_step=0, members=None, tensorboard=False):
  return records.Metrics(
    folder, start_step=start_step, members=members, tensorboard=tensorboard
  )


def write_steps(folder, first, last, start_step=0, tensorboard=False):
  with metrics(folder, start_step, tensorboard=tensorboard) as writer:
    for step in range(first, last + 1):
      loss = math.nan if step == 4 else 1 / step
      writer.write(step, {"train/loss": loss, "test/Käfer\x85自行车": 0.1 * step})


def other_process(folder, seconds_ago, **changes):
  """Makes status.json look like that of a process on another machine."""
  records.Status(folder).write("running", 1, 10)
  path = records.resolve(folder) / "status.json"
  now = datetime.datetime.now(datetime.UTC)
  beat = (now - datetime.timedelta(seconds=seconds_ago)).isoformat()
  status = records.read_json(path) | {"host": "elsewhere", "heartbeat": beat}
  records.write_json(path, status | changes)


class Bucket(MemoryFileSystem):
  """An object store: no append, and counted writes."""

  protocol = "gs"
  cachable = False
  store = {}
  pseudo_dirs = [""]
  written = []

  def open(self, path, mode="rb", **options):
    assert "a" not in mode, "an object store cannot append"
    if "w" in mode:
      self.written.append(path)
    return super().open(path, mode, **options)


@pytest.fixture
def bucket(monkeypatch):
  monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
  backend = type(gpath.backend_lib.fsspec_backend)
  monkeypatch.setattr(backend, "_get_filesystem", lambda *_: Bucket())
  Bucket.store.clear()
  Bucket.pseudo_dirs[:] = [""]
  Bucket.written.clear()
  return "gs://bucket/a run"


def test_json_and_status_on_a_remote_folder(bucket):
  folder = records.resolve(bucket)
  records.write_json(folder / "config.json", {"schema": 1, "é": 0.5})
  assert records.read_json(folder / "config.json", 1) == {"schema": 1, "é": 0.5}
  with pytest.raises(FileNotFoundError, match="no members.json in gs://bucket/a run"):
    records.read_json(folder / "members.json")
  records.Status(bucket).write("running", 3, 10)
  assert records.read_status(bucket)["step"] == 3
  assert not pathlib.Path("gs:").exists()


def test_a_remote_lock_is_the_heartbeat_of_another_process(bucket):
  with lock.Lock(bucket):
    pass
  for seconds_ago, changes, free in (
    (5, {}, False),
    (119, {}, False),
    (121, {}, True),
    (-20, {}, False),  # clocks differ a little
    (-5000, {}, True),  # a clock was wrong
    (5, {"state": "done"}, True),
    (5, {"host": os.uname().nodename}, True),  # ourselves
    (5, {"host": os.uname().nodename, "pid": -1}, False),
  ):
    other_process(bucket, seconds_ago, **changes)
    assert (lock.holder(bucket) is None) == free
    if free:
      with lock.Lock(bucket):
        pass
    else:
      with pytest.raises(lock.FolderInUse, match="since 20"), lock.Lock(bucket):
        pass


def test_remote_metrics_are_rewritten_whole_and_seldom(bucket, tmp_path, monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  write_steps(tmp_path, 1, 8)
  path = records.resolve(bucket) / "metrics.jsonl"
  writer = metrics(bucket)
  Bucket.written.clear()
  for step in range(1, 4):
    writer.write(step, {"train/loss": 1 / step})
  assert records.read(bucket) == [] and Bucket.written == []
  clock[0] += records.REMOTE_EVERY
  writer.write(4, {"train/loss": 0.25})
  assert len(records.read(bucket)) == 4 and len(Bucket.written) == 1
  writer.write(5, {"train/loss": 0.2})
  writer.flush()
  writer.flush()
  assert len(records.read(bucket)) == 5 and len(Bucket.written) == 2
  writer.close()
  writer.close()
  with pytest.raises(ValueError, match="after close"):
    writer.write(6, {"train/loss": 1.0})
  # A resume: the same bytes as in a local folder.
  path.write_bytes((tmp_path / "metrics.jsonl").read_bytes() + b'{"torn')
  write_steps(tmp_path, 6, 9, start_step=5)
  write_steps(bucket, 6, 9, start_step=5)
  assert path.read_bytes() == (tmp_path / "metrics.jsonl").read_bytes()


def test_remote_tensorboard_goes_through_the_same_paths(bucket):
  write_steps(bucket, 1, 3, tensorboard=True)
  folder = records.resolve(bucket) / "tensorboard"
  [file] = folder.iterdir()
  content, loss = file.read_bytes(), []
  while content:  # TFRecord: length, its checksum, body, its checksum
    (size,) = struct.unpack("<Q", content[:8])
    event = event_pb2.Event.FromString(content[12 : 12 + size])
    loss += [
      (event.step, v.simple_value) for v in event.summary.value if "loss" in v.tag
    ]
    content = content[16 + size :]
  assert loss == [(1, 1.0), (2, 0.5), (3, np.float32(1 / 3))]

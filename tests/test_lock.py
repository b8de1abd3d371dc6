"""One process a run folder."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from vit_jax import lock, records
from vit_jax.config import ConfigError

ROOT = pathlib.Path(records.__file__).parents[1]


def python(code, *arguments, **options):
  """Starts a Python process that sees the package."""
  return subprocess.Popen(
    [sys.executable, "-c", code, *map(str, arguments)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    text=True,
    **options,
  )


HOLD = """
import sys, time
from vit_jax import lock
with lock.Lock(sys.argv[1]):
  print("held", flush=True)
  time.sleep(60)
"""


@contextlib.contextmanager
def held_elsewhere(folder):
  process = python(HOLD, folder, stdout=subprocess.PIPE)
  try:
    assert process.stdout.readline() == "held\n"
    yield process
  finally:
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_and_a_kill_frees_it(tmp_path):
  folder = tmp_path / "a run"
  assert lock.holder(folder) is None
  with held_elsewhere(folder) as process:
    with pytest.raises(lock.FolderInUse) as error, lock.Lock(folder):
      pass
    text = str(error.value)
    assert f"process {process.pid} on {os.uname().nodename} since 20" in text
    assert "a run" in text and "\n" not in text
    assert lock.holder(folder)["pid"] == process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert lock.holder(folder) is None
    with lock.Lock(folder):
      assert lock.holder(folder)["pid"] == os.getpid()
      with pytest.raises(lock.FolderInUse), lock.Lock(folder):
        pass
  assert lock.holder(folder) is None
  with lock.Lock(folder):
    pass


def test_a_forked_worker_does_not_keep_the_folder(tmp_path):
  code = """
import os, sys, time
from vit_jax import lock
with lock.Lock(sys.argv[1]):
  worker = os.fork()
  if not worker:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
  time.sleep(60)
"""
  process = python(code, tmp_path, stdout=subprocess.PIPE)
  worker = int(process.stdout.readline())
  try:
    assert lock.holder(tmp_path)["pid"] == process.pid
    process.kill()
    process.wait()
    os.kill(worker, 0)  # it lives
    assert lock.holder(tmp_path) is None
  finally:
    os.kill(worker, signal.SIGKILL)
    process.stdout.close()


def test_a_lock_over_a_file_says_so(tmp_path):
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(ConfigError, match="a file is in the way"), lock.Lock(path):
      pass


def test_a_lock_clears_what_a_killed_write_left(tmp_path):
  (tmp_path / ".status.json.123.tmp").write_text("half")
  (tmp_path / "notes.tmp").write_text("mine")
  with lock.Lock(tmp_path):
    assert sorted(os.listdir(tmp_path)) == ["notes.tmp", "run.lock"]


def test_a_lock_without_flock_looks_at_the_heartbeat(tmp_path, monkeypatch):
  def unsupported(*_):
    raise OSError("no locks available")

  monkeypatch.setattr(fcntl, "flock", unsupported)
  records.Status(tmp_path).write("running", 1, 10)
  with lock.Lock(tmp_path):
    pass
  other_process(tmp_path, seconds_ago=5)
  with pytest.raises(lock.FolderInUse), lock.Lock(tmp_path):
    pass
  assert lock.holder(tmp_path)["host"] == "elsewhere"


def other_process(folder, seconds_ago, **changes):
  """Makes status.json look like that of a process on another machine."""
  records.Status(folder).write("running", 1, 10)
  path = records.resolve(folder) / "status.json"
  now = datetime.datetime.now(datetime.UTC)
  beat = (now - datetime.timedelta(seconds=seconds_ago)).isoformat()
  status = records.read_json(path) | {"host": "elsewhere", "heartbeat": beat}
  records.write_json(path, status | changes)

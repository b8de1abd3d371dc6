import contextlib
import datetime
import fcntl
import io
import json
import math
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from etils.epath import gpath
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax import records
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


def metrics(folder, start_step=0, members=None, tensorboard=False):
  return records.Metrics(
    folder, start_step=start_step, members=members, tensorboard=tensorboard
  )


# ---------------------------------------------------------------- paths and JSON


def test_a_folder_is_absolute_whatever_way_it_is_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  here = str(tmp_path)
  for text, path in {
    "runs/x": f"{here}/runs/x",
    "./runs/x/": f"{here}/runs/x",
    "a run/with spaces": f"{here}/a run/with spaces",
    "~/x": f"{here}/home/x",
    "~": f"{here}/home",
    "Läufe/第一": f"{here}/Läufe/第一",
    "/a/b": "/a/b",
    "gs://bucket/run/": "gs://bucket/run",
    "s3://bucket/~/x": "s3://bucket/~/x",
  }.items():
    assert os.fspath(records.resolve(text)) == path
  assert not records.is_remote(records.resolve("x"))
  assert records.is_remote(records.resolve("gs://bucket/run"))


@pytest.mark.parametrize(
  "text", ["", "  ", "gs:/bucket/run", "gs://", "http://a/b", "~nosuchuser/x"]
)
def test_a_folder_that_cannot_be_meant_is_refused(text):
  with pytest.raises(ConfigError, match="workdir=") as error:
    records.resolve(text)
  assert "\n" not in str(error.value)


def test_json_comes_back_and_nothing_is_added(tmp_path):
  value = {"schema": 1, "names": ["Käfer", "自行车", "\udcff"], "x": [1.5, None, True]}
  records.write_json(tmp_path / "new folder" / "a.json", value)
  assert records.read_json(tmp_path / "new folder" / "a.json") == value
  assert os.listdir(tmp_path / "new folder") == ["a.json"]
  assert "自行车" in (tmp_path / "new folder" / "a.json").read_text("utf-8")


def test_json_is_whole_or_old(tmp_path, monkeypatch):
  path = tmp_path / "a.json"
  records.write_json(path, {"schema": 1, "x": 1})

  def fail(*_):
    raise OSError("disk full")

  with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
    patch.setattr(os, "fsync", fail)
    records.write_json(path, {"schema": 1, "x": 2})
  with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
    patch.setattr(os, "replace", fail)
    records.write_json(path, {"schema": 1, "x": 2})
  with pytest.raises(TypeError):
    records.write_json(path, {"schema": 1, "x": object()})
  with pytest.raises(ValueError, match="a.json"):
    records.write_json(path, {"schema": 1, "x": math.nan})
  assert records.read_json(path) == {"schema": 1, "x": 1}
  assert os.listdir(tmp_path) == ["a.json"]


def test_json_that_cannot_be_read_is_named(tmp_path):
  path = tmp_path / "config.json"
  with pytest.raises(FileNotFoundError, match=r"no config.json in .*run folder"):
    records.read_json(path)
  for content in (b'{"schema": 1, "x', b"", b"\xff\xfe\x00"):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged") as error:
      records.read_json(path)
    assert "\n" not in str(error.value)
  records.write_json(path, {"schema": 2})
  assert records.read_json(path) == {"schema": 2}
  with pytest.raises(ValueError, match="has schema 2, expected 1"):
    records.read_json(path, schema=1)


# ---------------------------------------------------------------- environment


def test_environment_says_what_ran(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["train.py", "--workdir=a b"])
  environment = records.environment()
  records.write_json(tmp_path / "environment.json", environment)
  assert records.read_json(tmp_path / "environment.json", 1) == environment
  assert environment["packages"]["numpy"] == np.__version__
  assert set(environment["packages"]) == set(records.PACKAGES)
  assert environment["python"] == sys.version.split()[0]
  assert environment["devices"]["count"] == 4
  assert environment["devices"]["processes"] == 1
  assert environment["command"] == ["train.py", "--workdir=a b"]
  started = datetime.datetime.fromisoformat(environment["started"])
  age = datetime.datetime.now(datetime.UTC) - started
  assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)


def test_importing_records_does_not_import_jax():
  process = python(
    "import sys, vit_jax.records; print({'jax', 'tensorboardX', 'wandb'} & {*sys.modules})",
    stdout=subprocess.PIPE,
  )
  assert process.communicate()[0].strip() == "set()"


def test_differences_names_what_changed_and_only_that():
  old = {
    "python": "3.11.7",
    "packages": {"jax": "0.10.2", "optax": "0.2.8", "vit_jax": None},
    "git": {"commit": "a" * 40, "dirty": False},
    "devices": {"kind": "cpu", "count": 4, "processes": 1},
    "command": ["a"],
    "started": "2020",
  }
  new = json.loads(json.dumps(old)) | {"command": ["b"], "started": "2021"}
  assert records.differences(old, new) == []
  new["packages"] |= {"jax": "0.12.0", "vit_jax": "0.1.0"}
  new["git"]["dirty"] = True
  new["devices"]["count"] = 8
  assert records.differences(old, new) == [
    "jax 0.10.2 -> 0.12.0",
    "vit_jax none -> 0.1.0",
    "commit aaaaaaaaaa -> aaaaaaaaaa with changes",
    "number of devices 4 -> 8",
  ]
  assert "commit aaaaaaaaaa -> none" in records.differences(old, {**old, "git": None})


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path, monkeypatch):
  def git(*command):
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
      ["git", "-C", tmp_path / "repo", *name, *command], capture_output=True, check=True
    )
    return done.stdout.decode().strip()

  package = tmp_path / "repo" / "vit_jax"
  package.mkdir(parents=True)
  assert records._git(package) is None
  git("init", "-q")
  (package / "a.py").write_text("x = 1")
  assert records._git(package) is None  # no commit yet
  git("add", ".")
  git("commit", "-q", "-m", "first")
  commit = git("rev-parse", "HEAD")
  assert records._git(package) == {"commit": commit, "dirty": False}
  monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
  assert records._git(package) == {"commit": commit, "dirty": False}
  monkeypatch.delenv("GIT_DIR")
  (package / "a.py").write_text("x = 2")
  assert records._git(package) == {"commit": commit, "dirty": True}
  # Installed somewhere below another project: that commit is not ours.
  deeper = tmp_path / "repo" / ".venv" / "vit_jax"
  deeper.mkdir(parents=True)
  assert records._git(deeper) is None
  monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
  assert records._git(package) is None


# ---------------------------------------------------------------- lock and status

HOLD = """
import sys, time
from vit_jax import records
with records.Lock(sys.argv[1]):
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
  assert records.holder(folder) is None
  with held_elsewhere(folder) as process:
    with pytest.raises(records.FolderInUse) as error, records.Lock(folder):
      pass
    text = str(error.value)
    assert f"process {process.pid} on {os.uname().nodename} since 20" in text
    assert "a run" in text and "\n" not in text
    assert records.holder(folder)["pid"] == process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert records.holder(folder) is None
    with records.Lock(folder):
      assert records.holder(folder)["pid"] == os.getpid()
      with pytest.raises(records.FolderInUse), records.Lock(folder):
        pass
  assert records.holder(folder) is None
  with records.Lock(folder):
    pass


def test_a_forked_worker_does_not_keep_the_folder(tmp_path):
  code = """
import os, sys, time
from vit_jax import records
with records.Lock(sys.argv[1]):
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
    assert records.holder(tmp_path)["pid"] == process.pid
    process.kill()
    process.wait()
    os.kill(worker, 0)  # it lives
    assert records.holder(tmp_path) is None
  finally:
    os.kill(worker, signal.SIGKILL)
    process.stdout.close()


def test_a_lock_over_a_file_says_so(tmp_path):
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(ConfigError, match="a file is in the way"), records.Lock(path):
      pass


def test_a_lock_clears_what_a_killed_write_left(tmp_path):
  (tmp_path / ".status.json.123.tmp").write_text("half")
  (tmp_path / "notes.tmp").write_text("mine")
  with records.Lock(tmp_path):
    assert sorted(os.listdir(tmp_path)) == ["notes.tmp", "run.lock"]


def test_a_lock_without_flock_looks_at_the_heartbeat(tmp_path, monkeypatch):
  def unsupported(*_):
    raise OSError("no locks available")

  monkeypatch.setattr(fcntl, "flock", unsupported)
  records.Status(tmp_path).write("running", 1, 10)
  with records.Lock(tmp_path):
    pass
  other_process(tmp_path, seconds_ago=5)
  with pytest.raises(records.FolderInUse), records.Lock(tmp_path):
    pass
  assert records.holder(tmp_path)["host"] == "elsewhere"


def other_process(folder, seconds_ago, **changes):
  """Makes status.json look like that of a process on another machine."""
  records.Status(folder).write("running", 1, 10)
  path = records.resolve(folder) / "status.json"
  now = datetime.datetime.now(datetime.UTC)
  beat = (now - datetime.timedelta(seconds=seconds_ago)).isoformat()
  status = records.read_json(path) | {"host": "elsewhere", "heartbeat": beat}
  records.write_json(path, status | changes)


def test_status_is_written_at_once_when_it_changes_and_seldom_otherwise(
  tmp_path, monkeypatch
):
  assert records.read_status(tmp_path) is None
  clock = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  status = records.Status(tmp_path)
  seen = []

  def write(state, step, wait, message=""):
    clock[0] += wait
    status.write(state, step, 10, message)
    found = records.read_status(tmp_path)
    seen.append((found["state"], found["step"], found["message"]))

  write("running", 1, 0)
  write("running", 2, 1)
  write("running", 3, records.STATUS_EVERY)
  write("failed", 3, 0.1, "loss is nan\nat step 3")
  write("running", 4, 0.1)
  write("done", 10, 0.1)
  assert seen == [
    ("running", 1, ""),
    ("running", 1, ""),
    ("running", 3, ""),
    ("failed", 3, "loss is nan\nat step 3"),
    ("running", 4, ""),
    ("done", 10, ""),
  ]
  found = records.read_json(tmp_path / "status.json", 1)
  assert found["pid"] == os.getpid() and found["total"] == 10
  with pytest.raises(ValueError, match="state='finished'"):
    status.write("finished", 10, 10)


# ---------------------------------------------------------------- metrics


@settings(max_examples=30, deadline=None)
@given(
  st.lists(
    st.floats() | st.floats(width=32).map(np.float32) | st.sampled_from(
      [5e-324, -0.0, 0.1 + 0.2, 1e308, 2**53 + 1.0, math.inf, -math.inf, math.nan]
    ),
    max_size=8,
  )
)  # fmt: skip
def test_floats_read_back_exactly(tmp_path_factory, numbers):
  folder = tmp_path_factory.mktemp("run")
  with metrics(folder) as writer:
    writer.write(3, {f"train/{k}": number for k, number in enumerate(numbers)})
  [row] = records.read(folder)
  assert (row.pop("schema"), row.pop("step")) == (1, 3)
  pack = struct.Struct("<d").pack
  assert len(row) == len(numbers)
  for k, number in enumerate(numbers):
    if math.isnan(number):
      assert math.isnan(row[f"train/{k}"])
    else:
      assert pack(row[f"train/{k}"]) == pack(float(number))


def test_a_row_is_strict_json_with_what_is_not_finite_beside(tmp_path):
  def refuse(text):
    raise AssertionError(f"{text} is not JSON")

  with metrics(tmp_path) as writer:
    writer.write(7, {"train/loss": math.nan, "train/norm": -math.inf, "time/s": 0.5})
  [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert json.loads(line, parse_constant=refuse) == {
    "schema": 1,
    "step": 7,
    "train/loss": None,
    "train/norm": None,
    "time/s": 0.5,
    "non_finite": {"train/loss": "nan", "train/norm": "-inf"},
  }
  [row] = records.read(tmp_path)
  assert math.isnan(row["train/loss"]) and row["train/norm"] == -math.inf
  assert "non_finite" not in row


def test_members_have_a_number_and_a_run_alone_has_none(tmp_path):
  with metrics(tmp_path / "two", members=["seed=0", "seed=1"]) as writer:
    writer.write(1, {"train/loss": 0.5}, member=0)
    writer.write(1, {"train/loss": 0.25}, member=1)
    for member in (None, 2, -1):
      with pytest.raises(ValueError, match=f"member={member}"):
        writer.write(2, {"train/loss": 0.5}, member=member)
  rows = [
    (r["step"], r["member"], r["train/loss"]) for r in records.read(tmp_path / "two")
  ]
  assert rows == [(1, 0, 0.5), (1, 1, 0.25)]
  for members in (None, ["seed=0"]):
    with metrics(tmp_path / "one", members=members) as writer:
      writer.write(1, {"train/loss": 0.5}, member=0)
      writer.write(2, {"train/loss": 0.5})
      with pytest.raises(ValueError, match="member=1"):
        writer.write(2, {"train/loss": 0.5}, member=1)
    assert all("member" not in row for row in records.read(tmp_path / "one"))


def test_values_that_are_no_numbers_and_reserved_names_are_refused(tmp_path):
  with metrics(tmp_path) as writer:
    for value in ("1.0", None, np.ones(1), np.ones(3), [1.0], 10**400):
      with pytest.raises(TypeError, match="train/loss.*a single number"):
        writer.write(1, {"train/loss": value})
    with pytest.raises(ValueError, match="'step'"):
      writer.write(1, {"step": 2.0})
    writer.write(1, {"train/loss": np.float32(0.1), "train/n": np.int64(3), "b": True})
  with pytest.raises(ValueError, match="after close"):
    writer.write(2, {"train/loss": 1.0})
  [row] = records.read(tmp_path)
  assert row == {
    "schema": 1, "step": 1, "train/loss": float(np.float32(0.1)), "train/n": 3.0, "b": 1.0
  }  # fmt: skip


def write_steps(folder, first, last, start_step=0, tensorboard=False):
  with metrics(folder, start_step, tensorboard=tensorboard) as writer:
    for step in range(first, last + 1):
      loss = math.nan if step == 4 else 1 / step
      writer.write(step, {"train/loss": loss, "test/Käfer\x85自行车": 0.1 * step})


TORN = [
  b"",
  b'{"schema": 1, "step": 9, "train/lo',
  '{"schema": 1, "step": 9, "test/自'.encode()[:-1],
  b"\x00\x00\x00",
  b'{"schema": 1, "step": 9, "train/loss": 1.0}',
  b'{"schema": 1, "st\n',
]


@pytest.mark.parametrize("torn", TORN)
def test_a_resumed_file_is_the_unbroken_one_bit_for_bit(tmp_path, torn):
  write_steps(tmp_path / "unbroken", 1, 10)
  write_steps(tmp_path / "resumed", 1, 8)
  path = tmp_path / "resumed" / "metrics.jsonl"
  with path.open("ab") as file:
    file.write(torn)
  assert [r["step"] for r in records.read(tmp_path / "resumed")][:8] == [*range(1, 9)]
  write_steps(tmp_path / "resumed", 6, 10, start_step=5)
  assert path.read_bytes() == (tmp_path / "unbroken" / "metrics.jsonl").read_bytes()


def test_a_last_row_that_lacks_only_its_end_is_kept(tmp_path):
  write_steps(tmp_path, 1, 5)
  path = tmp_path / "metrics.jsonl"
  whole = path.read_bytes()
  path.write_bytes(whole[:-1])
  metrics(tmp_path, start_step=5).close()
  assert path.read_bytes() == whole


def test_rows_are_kept_by_step_even_where_they_look_unusual(tmp_path):
  lines = [
    b'{"step":2,   "schema":1, "x":1.50}\n',
    b'{"schema": 1, "step": 9, "x": 1}\n',
    '{"schema": 1, "step": 3, "é": 2}\n'.encode(),
  ]
  (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
  metrics(tmp_path, start_step=3).close()
  assert (tmp_path / "metrics.jsonl").read_bytes() == lines[0] + lines[2]


def test_a_new_run_starts_a_new_file_and_a_resumed_one_writes_no_old_step(tmp_path):
  write_steps(tmp_path, 1, 3)
  with metrics(tmp_path, start_step=2) as writer:
    with pytest.raises(ValueError, match="goes on from step 2"):
      writer.write(2, {"train/loss": 1.0})
    writer.write(3, {"train/loss": 1.0})
  assert [row["step"] for row in records.read(tmp_path)] == [1, 2, 3]
  with metrics(tmp_path, start_step=0) as writer:
    assert records.read(tmp_path) == []
    writer.write(0, {"val/loss": 1.0})
  with metrics(tmp_path, start_step=0) as writer:  # killed before its checkpoint
    writer.write(0, {"val/loss": 1.0})
  assert [row["step"] for row in records.read(tmp_path)] == [0]


def test_damage_in_the_middle_is_named_and_not_dropped(tmp_path):
  with pytest.raises(FileNotFoundError, match="no metrics.jsonl in"):
    records.read(tmp_path)
  path = tmp_path / "metrics.jsonl"
  content = b'{"schema": 1, "step": 1}\n{"schem\n{"schema": 1, "step": 3}\n'
  path.write_bytes(content)
  for reader in (
    lambda: records.read(tmp_path),
    lambda: metrics(tmp_path, start_step=3),
  ):
    with pytest.raises(
      ValueError, match=r"metrics\.jsonl is damaged in line 2"
    ) as error:
      reader()
    assert "\n" not in str(error.value)
  assert path.read_bytes() == content


def test_each_row_is_there_before_the_writer_closes(tmp_path):
  with metrics(tmp_path) as writer:
    for step in (1, 2, 3):
      writer.write(step, {"train/loss": 1.0})
      assert [row["step"] for row in records.read(tmp_path)][-1] == step


def test_equal_leaves_out_the_clock_and_nothing_else():
  row = {"schema": 1, "step": 1, "train/loss": 0.5, "x": math.nan, "time/s": 1.0}
  clock = {"schema": 1, "step": 1, "time/wait": 3.0}
  assert records.equal([row], [clock, {**row, "time/s": 2.0}]) == []
  other = {**row, "train/loss": math.nextafter(0.5, 1)}
  assert records.equal([row], [other]) == [
    f"step 1: train/loss 0.5 against {math.nextafter(0.5, 1)!r}"
  ]
  assert records.equal([row], []) == ["step 1: 1 rows against 0"]
  assert records.equal([row], [{**row, "y": 1.0}]) == ["step 1: y only in the second"]
  assert records.equal([{**row, "y": 1.0}], [row]) == ["step 1: y only in the first"]
  assert len(records.equal([row], [{**row, "x": 1.0}])) == 1
  two = [{**row, "member": 1}, {**row, "member": 0}]
  assert records.equal(two, two[::-1]) == []
  assert records.equal(two, [two[0], {**other, "member": 0}])[0].startswith(
    "step 1 member 0: train/loss"
  )


# ---------------------------------------------------------------- TensorBoard


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
  files = [f for f in records.epath.Path(folder).iterdir() if "tfevents" in f.name]
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
  write_steps(tmp_path / "a", 1, 6, tensorboard=True)
  write_steps(tmp_path / "b", 1, 5, tensorboard=True)
  write_steps(tmp_path / "b", 4, 6, start_step=3, tensorboard=True)
  a, b = scalars(tmp_path / "a/tensorboard"), scalars(tmp_path / "b/tensorboard")
  np.testing.assert_equal(a, b)  # nan equals nan
  loss = {step: value for tag, step, value in b if tag == "train/loss"}
  assert list(loss) == [1, 2, 3, 4, 5, 6]
  assert loss[3] == np.float32(1 / 3) and math.isnan(loss[4])
  assert events(tmp_path / "a/tensorboard")[0].file_version == "brain.Event:2"
  write_steps(tmp_path / "b", 1, 1, tensorboard=True)
  assert {step for _, step, _ in scalars(tmp_path / "b/tensorboard")} == {1}


def test_tensorboard_has_a_folder_a_member(tmp_path):
  names = ["seed=0,patch=(4, 4)", "seed=1/../x", "ä" * 300]
  with metrics(tmp_path, members=names, tensorboard=True) as writer:
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


# ---------------------------------------------------------------- a kill

WRITE = """
import sys
from vit_jax import records
with records.Lock(sys.argv[1]):
  status = records.Status(sys.argv[1])
  records.STATUS_EVERY = 0
  metrics = records.Metrics(sys.argv[1], start_step=0, members=None)
  for step in range(1, 10**9):
    metrics.write(step, {"train/loss": 1 / step, "test/自行车" * 50: 0.5})
    status.write("running", step, 10**9)
    if step == 50:
      print("busy", flush=True)
"""


def test_a_kill_leaves_a_folder_that_can_be_read_and_gone_on_with(tmp_path):
  process = python(WRITE, tmp_path, stdout=subprocess.PIPE)
  assert process.stdout.readline() == "busy\n"
  assert records.holder(tmp_path)["pid"] == process.pid
  process.kill()
  process.communicate()
  rows = records.read(tmp_path)
  assert len(rows) >= 50
  assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
  status = records.read_status(tmp_path)
  # A row is written before the status of its step.
  assert status["state"] == "running" and 0 <= len(rows) - status["step"] <= 1
  with records.Lock(tmp_path):
    assert sorted(os.listdir(tmp_path)) == [
      "metrics.jsonl", "run.lock", "status.json", "tensorboard"
    ]  # fmt: skip
    with metrics(tmp_path, start_step=40) as writer:
      writer.write(41, {"train/loss": 0.5})
  assert [row["step"] for row in records.read(tmp_path)] == [*range(1, 42)]


# ---------------------------------------------------------------- remote folders


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
  with records.Lock(bucket):
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
    assert (records.holder(bucket) is None) == free
    if free:
      with records.Lock(bucket):
        pass
    else:
      with pytest.raises(records.FolderInUse, match="since 20"), records.Lock(bucket):
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
  loss = [(s, v) for tag, s, v in scalars(folder) if tag == "train/loss"]
  assert loss == [(1, 1.0), (2, 0.5), (3, np.float32(1 / 3))]


# ---------------------------------------------------------------- Weights & Biases


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


# ---------------------------------------------------------------- progress


def show(progress, steps, clock, seconds=1.0):
  for step in steps:
    clock[0] += seconds
    progress.update(
      step,
      {"train/loss": 1 / step, "train/accuracy": 0.5, "time/images_per_second": 1234.5},
    )


@pytest.fixture
def clock(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: clock[0])
  return clock


def test_without_a_terminal_there_are_few_plain_lines(capsys, clock):
  progress = records.Progress(100, start=0, every=30.0)
  show(progress, range(1, 101), clock)
  progress.note("saved")
  progress.close()
  out, err = capsys.readouterr()
  assert out == ""
  assert err.splitlines() == [
    "step 1/100  loss 1.0000  accuracy 0.5000  1234 images/s",
    "step 31/100  loss 0.0323  accuracy 0.5000  1234 images/s  0:01:09 left",
    "step 61/100  loss 0.0164  accuracy 0.5000  1234 images/s  0:00:39 left",
    "step 91/100  loss 0.0110  accuracy 0.5000  1234 images/s  0:00:09 left",
    "step 100/100  loss 0.0100  accuracy 0.5000  1234 images/s  0:00:00 left",
    "saved",
  ]


def test_the_last_line_of_a_stopped_run_is_shown(capsys, clock):
  progress = records.Progress(7200, start=10, every=30.0)
  show(progress, [11, 12, 13], clock)
  progress.update(13, {})
  progress.close()
  progress.close()
  lines = capsys.readouterr().err.splitlines()
  assert [line.split()[1] for line in lines] == ["11/7200", "13/7200"]
  assert lines[-1] == "step 13/7200  1:59:47 left"


def test_a_terminal_gets_a_bar(monkeypatch):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  terminal = Terminal()
  monkeypatch.setattr(sys, "stderr", terminal)
  progress = records.Progress(20, start=4)
  progress.update(8, {"train/loss": 0.125, "time/images_per_second": 99.0})
  progress.note("test/accuracy 0.9")
  progress.update(20, {"train/loss": 0.125})
  progress.close()
  text = terminal.getvalue()
  assert " 4/20 " in text and " 20/20 " in text and "loss 0.1250" in text
  assert "test/accuracy 0.9\n" in text
  assert text.endswith("\n")


@pytest.mark.parametrize("kind", ["none", "closed", "broken", "breaks later"])
def test_losing_stderr_does_not_stop_training(kind, monkeypatch):
  class Broken(io.StringIO):
    def isatty(self):
      return True

    def write(self, text):
      if broken:
        raise BrokenPipeError
      return super().write(text)

  streams = {"none": None, "closed": io.StringIO()}
  streams["closed"].close()
  monkeypatch.setattr(sys, "stderr", streams.get(kind, Broken()))
  broken = kind == "broken"
  progress = records.Progress(3)
  broken = True
  for step in (1, 2, 3):
    progress.update(step, {"train/loss": 1.0})
  progress.note("text")
  progress.close()


def test_progress_in_a_pipe_whose_reader_leaves():
  code = """
import sys
from vit_jax import records
progress = records.Progress(3, every=0)
progress.update(1, {"train/loss": 1.0})
sys.stdin.readline()
progress.update(2, {})
progress.close()
print("end", flush=True)
"""
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  process = python(code, **pipes)
  assert process.stderr.readline() == "step 1/3  loss 1.0000\n"
  process.stderr.close()
  process.stdin.write("\n")
  process.stdin.close()
  assert process.stdout.read() == "end\n"
  process.stdout.close()
  process.wait()

"""The run folder: JSON, status and metrics.jsonl."""

import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_importing_records_does_not_import_jax():
  process = python(
    "import sys, vit_jax.records; print({'jax', 'tensorboardX', 'wandb'} & {*sys.modules})",
    stdout=subprocess.PIPE,
  )
  assert process.communicate()[0].strip() == "set()"


# ---------------------------------------------------------------- status


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
  records.Status(tmp_path, main=False).write("failed", 1, 10)
  assert records.read_status(tmp_path)["state"] == "done"


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


# ---------------------------------------------------------------- a kill


WRITE = """
import sys
from vit_jax import lock, records
with lock.Lock(sys.argv[1]):
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
  assert lock.holder(tmp_path)["pid"] == process.pid
  process.kill()
  process.communicate()
  rows = records.read(tmp_path)
  assert len(rows) >= 50
  assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
  status = records.read_status(tmp_path)
  # A row is written before the status of its step.
  assert status["state"] == "running" and 0 <= len(rows) - status["step"] <= 1
  with lock.Lock(tmp_path):
    assert sorted(os.listdir(tmp_path)) == [
      "metrics.jsonl", "run.lock", "status.json", "tensorboard"
    ]  # fmt: skip
    with metrics(tmp_path, start_step=40) as writer:
      writer.write(41, {"train/loss": 0.5})
  assert [row["step"] for row in records.read(tmp_path)] == [*range(1, 42)]

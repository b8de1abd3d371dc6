"""The run folder, apart from its checkpoints: what a run says about itself.

    config.json       the resolved configuration
    members.json      names and values of the members of a population
    metrics.jsonl     one strict JSON object a line, one line a (step, member)
    environment.json  versions, commit, devices, command line
    status.json       state, step and heartbeat of the process that trains
    run.lock          held while a process trains here (local folders)
    tensorboard/      the metrics again, for the eye

Every JSON object carries `"schema"`, the version of its form. Paths are `etils.epath`
paths: a local folder, or `gs://`, `s3://`, `az://`, `hf://`. An object store cannot
append, nor lock: there `metrics.jsonl` is rewritten as a whole from memory at each
flush, and the lock is the heartbeat in `status.json`.

In a run of several processes only process 0 writes: the others make no `Status` and no
`Metrics`. `lock` holds the folder, `provenance` says what environment.json holds,
`trackers` write the metrics elsewhere. This module imports no JAX.
"""

import datetime
import json
import math
import os
import pathlib
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax import trackers
from vit_jax.config import ConfigError

# The version of the form of each file.
SCHEMAS = {
  "config.json": 1,
  "members.json": 1,
  "metrics.jsonl": 1,
  "environment.json": 1,
  "status.json": 1,
  "run.lock": 1,
  "wandb.json": 1,
}

STATES = ("running", "done", "failed", "stopped")

# "running" is written to status.json at most this often, in seconds.
STATUS_EVERY = 5.0
# metrics.jsonl of a remote folder is rewritten at most this often, in seconds; object
# stores allow about one write a second to one object.
REMOTE_EVERY = 30.0

_REMOTE = ("gs", "s3", "az", "hf")
# Names of a row of metrics.jsonl that no metric may take.
_RESERVED = ("schema", "step", "member", "non_finite")


# ---------------------------------------------------------------- paths and JSON


def resolve(workdir: str | os.PathLike) -> epath.Path:
  """Returns the folder as an absolute path, `~` expanded; `gs://…` stays as it is.

  Raises:
    ConfigError: an empty path, an unknown user after `~`, or an address of a scheme
      that cannot be written to.
  """
  text = os.fspath(workdir)
  if not text.strip():
    raise ConfigError(
      f"workdir={text!r} is empty; expected a folder, as in 'runs/first'"
    )
  scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text)
  if scheme:
    known = ", ".join(f"{s}://" for s in _REMOTE)
    if not text.startswith(tuple(f"{s}://" for s in _REMOTE)):
      # pathlib turns gs://a into gs:/a, which would become a local folder "gs:".
      raise ConfigError(f"workdir={text!r}: expected a local folder or one of {known}")
    if not text.split("://")[1].strip("/"):
      raise ConfigError(
        f"workdir={text!r} names no bucket; try '{scheme[1]}://bucket/run'"
      )
    return epath.Path(text)
  path = epath.Path(text).expanduser()
  if os.fspath(path).startswith("~"):
    raise ConfigError(f"workdir={text!r}: no such user; try './{text}' for a folder ~")
  return path.resolve()


def is_remote(path: epath.Path) -> bool:
  return "://" in os.fspath(path)


def read_json(path: str | os.PathLike, schema: int | None = None) -> Any:
  """Returns the value of a JSON file.

  Args:
    path: the file.
    schema: the version that the caller understands; None: not compared.

  Raises:
    FileNotFoundError: there is no such file.
    ConfigError: the file is damaged, or has another schema.
  """
  path = epath.Path(path)
  try:
    text = path.read_bytes()
  except FileNotFoundError:
    raise FileNotFoundError(
      f"no {path.name} in {os.fspath(path.parent)}; expected a run folder"
    ) from None
  try:
    value = json.loads(text.decode("utf-8"))
  except ValueError as error:  # also UnicodeDecodeError
    raise ConfigError(f"{os.fspath(path)} is damaged: {error}") from None
  if schema is not None:
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
      raise ConfigError(
        f"{os.fspath(path)} has schema {found!r}, expected {schema}; it was written "
        "by another version of vit_jax"
      )
  return value


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes `value` as strict JSON; a reader sees the old file or the new one, whole.

  The folder is made where missing. On an object store a write is atomic by itself.

  Raises:
    ValueError: `value` holds NaN or infinity, which JSON does not know.
    TypeError: `value` holds something that is not JSON.
  """
  path = epath.Path(path)
  try:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
  except ValueError as error:
    raise ValueError(f"{os.fspath(path)}: {error}") from None
  _write_whole(path, _encode(text + "\n"))


def _encode(text: str) -> bytes:
  """UTF-8; a lone surrogate (an undecodable byte of a file name) as a JSON escape."""
  return text.encode("utf-8", "backslashreplace")


def _write_whole(path: epath.Path, content: bytes) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  name = os.fspath(path)
  # A device or a pipe is written to, not replaced.
  if is_remote(path) or (os.path.exists(name) and not os.path.isfile(name)):
    path.write_bytes(content)
    return
  temporary = os.path.join(
    os.path.dirname(name), f".{os.path.basename(name)[:100]}.{uuid.uuid4().hex}.tmp"
  )
  try:
    with open(temporary, "xb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, name)
  except BaseException:
    pathlib.Path(temporary).unlink(missing_ok=True)
    raise


def now() -> str:
  """Returns the time in UTC, as in `2030-01-31T12:00:00.000+00:00`."""
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------- status


class Status:
  """Writes status.json: how far the run is, and that its process lives.

  Args:
    workdir: run folder.
    main: whether this is the process that writes; the others of a run write nothing.
  """

  def __init__(self, workdir: str | os.PathLike, main: bool = True):
    self.path = resolve(workdir) / "status.json"
    self._main = main
    self._started = now()
    self._ended = {}
    self._last_state = None
    self._last_time = -math.inf

  def write(self, state: str, step: int, total: int, message: str = "") -> None:
    """Records the state; "running" again within a few seconds is not written.

    Args:
      state: "running", "done", "failed" or "stopped".
      step: steps done.
      total: steps of the whole run.
      message: why, as the traceback of a failed run.
    """
    if state not in STATES:
      raise ValueError(f"state={state!r}: expected one of {', '.join(STATES)}")
    if not self._main:
      return
    clock = time.monotonic()
    recent = clock - self._last_time < STATUS_EVERY
    if state == "running" == self._last_state and recent:
      return
    write_json(
      self.path,
      {
        "schema": SCHEMAS["status.json"],
        "state": state,
        "step": int(step),
        "total": int(total),
        "message": message,
        "ended": self._ended,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": self._started,
        "heartbeat": now(),
      },
    )
    self._last_state, self._last_time = state, clock

  def end_member(self, name: str, how: Mapping[str, Any]) -> None:
    """Notes, for the next write, that a member of a population goes on no more.

    Args:
      name: of the member.
      how: `step`, `reason` ("diverged" or "dropped") and `message`.
    """
    self._ended[name] = dict(how)
    self._last_time = -math.inf


def read_status(workdir: str | os.PathLike) -> dict[str, Any] | None:
  """Returns status.json, or None where the run has not written one."""
  try:
    return read_json(resolve(workdir) / "status.json", SCHEMAS["status.json"])
  except FileNotFoundError:
    return None


# ---------------------------------------------------------------- metrics


class Metrics:
  """Writes metrics.jsonl, TensorBoard files and, when asked, Weights & Biases.

  A row is `{"schema": 1, "step": 50, "member": 0, "train/loss": 0.25, …}`; `member` is
  there only with more than one member. Floats read back exactly. JSON knows neither
  NaN nor infinity: such a value is `null`, and `"non_finite": {"train/loss": "nan"}`
  says which (`"nan"`, `"inf"`, `"-inf"`); `read` restores it.

  Args:
    workdir: the run folder.
    start_step: step of the checkpoint that the run goes on from. Rows above it, and a
      torn last line, are dropped; the others stay bit for bit. 0 starts anew.
    members: names of the members; None: a run alone.
    tensorboard: write event files; members go to sub-folders.
    wandb: name of a Weights & Biases project; None: not used.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    start_step: int,
    members: Sequence[str] | None,
    tensorboard: bool = True,
    wandb: str | None = None,
  ):
    self.workdir = resolve(workdir)
    self.path = self.workdir / "metrics.jsonl"
    self._start = int(start_step)
    self._members = list(members) if members and len(members) > 1 else None
    # Before anything is written, since the package may be missing.
    self._trackers = [self._wandb(wandb)] if wandb else []
    kept, same = _kept_lines(self.path, self._start)
    if not same:
      _write_whole(self.path, b"".join(kept))
    self._lines = kept if is_remote(self.path) else None
    self._written = time.monotonic()
    self._dirty = False
    self._file = None
    if not is_remote(self.path):
      self.workdir.mkdir(parents=True, exist_ok=True)
      self._file = open(os.fspath(self.path), "ab")  # noqa: SIM115
    if tensorboard:
      board = self.workdir / "tensorboard"
      self._trackers.append(trackers.TensorBoard(board, self._members, self._start))

  def write(
    self, step: int, values: Mapping[str, float], member: int | None = None
  ) -> None:
    """Writes one row and hands it to the system, so that a kill loses none.

    On a remote folder the row is in memory until the next flush (every 30 s, at
    `flush()` and `close()`): flush before a checkpoint is saved.

    Args:
      step: optimizer steps done; above `start_step` of a resumed run.
      values: names such as "train/loss" and their numbers.
      member: which member; needed with more than one.

    Raises:
      ValueError: a reserved name, a step of the past, a missing or unknown member.
      TypeError: a value that is not a single number.
    """
    if self._file is None and self._lines is None:
      raise ValueError(f"{os.fspath(self.path)}: written to after close()")
    step = int(step)
    if self._start and step <= self._start:
      raise ValueError(
        f"metrics of step {step}, but the run goes on from step {self._start}, whose "
        "rows are kept"
      )
    row = {"schema": SCHEMAS["metrics.jsonl"], "step": step}
    if self._members:
      if member is None or not 0 <= member < len(self._members):
        raise ValueError(f"member={member}: expected 0 to {len(self._members) - 1}")
      row["member"] = int(member)
    elif member not in (None, 0):
      raise ValueError(f"member={member}: the run has one member; expected 0 or None")
    numbers = {name: _number(name, value) for name, value in values.items()}
    non_finite = {}
    for name, value in numbers.items():
      row[name] = value if math.isfinite(value) else None
      if not math.isfinite(value):
        non_finite[name] = str(value)
    if non_finite:
      row["non_finite"] = non_finite
    line = _encode(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    if self._file is not None:
      self._file.write(line)
      self._file.flush()
    else:
      self._lines.append(line)
      self._dirty = True
      if time.monotonic() - self._written >= REMOTE_EVERY:
        self._write_remote()
    for tracker in self._trackers:
      tracker.write(step, numbers, row.get("member"))

  def flush(self) -> None:
    """Makes every row durable; call it before a checkpoint is saved."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())
    elif self._dirty:
      self._write_remote()
    for tracker in self._trackers:
      tracker.flush()

  def close(self) -> None:
    self.flush()
    if self._file is not None:
      self._file.close()
      self._file = None
    self._lines = None
    for tracker in self._trackers:
      tracker.close()
    self._trackers = []

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def _wandb(self, project):
    """A Weights & Biases run whose id is kept in the folder."""
    path = self.workdir / "wandb.json"
    known = path.exists()
    run_id = (
      read_json(path, SCHEMAS["wandb.json"])["id"] if known else uuid.uuid4().hex[:16]
    )
    local = None if is_remote(self.workdir) else os.fspath(self.workdir)
    run = trackers.WandB(project, self.workdir.name, run_id, local, self._members)
    if not known:
      write_json(path, {"schema": SCHEMAS["wandb.json"], "id": run_id})
    return run

  def _write_remote(self):
    _write_whole(self.path, b"".join(self._lines))
    self._written, self._dirty = time.monotonic(), False


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the rows of metrics.jsonl, NaN and infinities restored.

  A torn last line (the run was killed, or writes this moment) is left out.

  Raises:
    FileNotFoundError: the folder has no metrics.jsonl.
    ValueError: a line before the last is damaged.
  """
  path = resolve(workdir) / "metrics.jsonl"
  if not path.exists():
    raise FileNotFoundError(
      f"no metrics.jsonl in {os.fspath(path.parent)}; expected a run folder"
    )
  rows = []
  for _, row in _parse_lines(path):
    for name, text in row.pop("non_finite", {}).items():
      row[name] = float(text)
    rows.append(row)
  return rows


def equal(rows_a: Sequence[Mapping], rows_b: Sequence[Mapping]) -> list[str]:
  """Returns the differences of two lists of rows, none where they are equal.

  Values are compared exactly, NaN equals NaN; names under `time/` do not count.
  """

  def by_place(rows):
    places = {}
    for row in rows:
      clean = {k: v for k, v in row.items() if not k.startswith("time/")}
      if not set(clean) <= {"schema", "step", "member"}:
        key = (clean["step"], clean.get("member"))
        places.setdefault(key, []).append(clean)
    return places

  a, b = by_place(rows_a), by_place(rows_b)
  found = []
  for key in sorted({**a, **b}, key=lambda k: (k[0], -1 if k[1] is None else k[1])):
    step, member = key
    where = f"step {step}" + ("" if member is None else f" member {member}")
    first, second = a.get(key, []), b.get(key, [])
    if len(first) != len(second):
      found.append(f"{where}: {len(first)} rows against {len(second)}")
      continue
    for x, y in zip(first, second):
      for name in {**x, **y}:
        if name not in x or name not in y:
          where_only = "first" if name in x else "second"
          found.append(f"{where}: {name} only in the {where_only}")
        elif not (x[name] == y[name] or (x[name] != x[name] and y[name] != y[name])):
          found.append(f"{where}: {name} {x[name]!r} against {y[name]!r}")
  return found


def _number(name: str, value) -> float:
  if name in _RESERVED:
    raise ValueError(f"a metric cannot be called {name!r}")
  try:
    if isinstance(value, (str, bytes)):
      raise TypeError
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise TypeError(f"{name}={value!r}: expected a single number") from None


def _parse_lines(path: epath.Path) -> list[tuple[bytes, dict[str, Any]]]:
  """Returns (line with its end, row) of each whole line of a metrics file."""
  lines = path.read_bytes().split(b"\n")  # not splitlines: U+0085 may be in a name
  if lines[-1] == b"":
    lines.pop()
  parsed = []
  for index, line in enumerate(lines):
    try:
      row = json.loads(line.decode("utf-8"))
      int(row["step"])
    except (ValueError, TypeError, KeyError) as error:
      if index == len(lines) - 1:
        break  # torn by a kill
      raise ConfigError(
        f"{os.fspath(path)} is damaged in line {index + 1}: {error!r}"
      ) from None
    parsed.append((line + b"\n", row))
  return parsed


def _kept_lines(path: epath.Path, start_step: int) -> tuple[list[bytes], bool]:
  """Returns the lines that a run from `start_step` keeps, and whether that is all."""
  if not path.exists():
    return [], False
  if start_step == 0:  # a step 0 of its own will be written again
    return [], False
  kept = [line for line, row in _parse_lines(path) if row["step"] <= start_step]
  return kept, b"".join(kept) == path.read_bytes()

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

In a run of several processes only process 0 writes: the others make no `Lock`,
`Status`, `Metrics` or `Progress`. This module imports no JAX until `environment()`.
"""

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

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

# A heartbeat older than this is that of a dead process (remote folders), in seconds.
HEARTBEAT_LIMIT = 120.0
# "running" is written to status.json at most this often, in seconds.
STATUS_EVERY = 5.0
# metrics.jsonl of a remote folder is rewritten at most this often, in seconds; object
# stores allow about one write a second to one object.
REMOTE_EVERY = 30.0
# Event files are handed to the system at most this often, in seconds.
BOARD_EVERY = 30.0

# Versions that decide what a run computes.
PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "numpy",
  "grain",
  "ml-collections",
  "tensorflow-datasets",
  "vit_jax",
)

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
    ValueError: the file is damaged, or has another schema.
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
    raise ValueError(f"{os.fspath(path)} is damaged: {error}") from None
  if schema is not None:
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
      raise ValueError(
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
  if is_remote(path):
    path.write_bytes(content)
    return
  name = os.fspath(path)
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


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------- environment


def environment() -> dict[str, Any]:
  """Returns what the run ran on: the content of environment.json.

  Imports JAX and starts its backends: call it after `jax.distributed.initialize`.
  """
  import jax

  devices = jax.devices()
  return {
    "schema": SCHEMAS["environment.json"],
    "python": platform.python_version(),
    "platform": platform.platform(),
    "host": socket.gethostname(),
    "packages": {name: _version(name) for name in PACKAGES},
    "git": _git(),
    "devices": {
      "platform": devices[0].platform,
      "kind": devices[0].device_kind,
      "count": len(devices),
      "processes": jax.process_count(),
    },
    "command": list(sys.argv),
    "started": _now(),
  }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Compares two `environment()`s; returns lines like `jax 0.10.2 -> 0.12.0`.

  Python, packages, commit and devices count; host, command line and time do not.
  """

  def facts(environment):
    packages = environment.get("packages") or {}
    devices = environment.get("devices") or {}
    git = environment.get("git")
    commit = git and git["commit"][:10] + (" with changes" if git["dirty"] else "")
    return {
      "python": environment.get("python"),
      **packages,
      "commit": commit,
      "device": devices.get("kind"),
      "number of devices": devices.get("count"),
      "number of processes": devices.get("processes"),
    }

  before, after = facts(old), facts(new)
  return [
    f"{name} {_or_none(before.get(name))} -> {_or_none(after.get(name))}"
    for name in {**before, **after}
    if before.get(name) != after.get(name)
  ]


def _or_none(value):
  return "none" if value is None else value


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git(package: str | os.PathLike | None = None) -> dict[str, Any] | None:
  """Returns {"commit", "dirty"} of the checkout that holds the package, or None.

  An installed package inside somebody else's checkout is not that checkout's code, so
  the package has to lie at its top. `dirty` is None where git did not answer in time.
  """
  package = os.path.realpath(package or os.path.dirname(os.path.abspath(__file__)))
  root = os.path.dirname(package)
  if _ask_git(root, "rev-parse", "--show-prefix") != "":
    return None
  commit = _ask_git(root, "rev-parse", "--verify", "HEAD")
  if commit is None:
    return None
  changes = _ask_git(root, "status", "--porcelain")
  return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _ask_git(root: str, *command: str) -> str | None:
  # GIT_DIR and the like (set inside a hook) would point at another repository; the
  # optional lock would disturb a git command that the user runs meanwhile.
  variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
  variables["GIT_OPTIONAL_LOCKS"] = "0"
  try:
    done = subprocess.run(
      ["git", "-C", root, *command],
      capture_output=True,
      stdin=subprocess.DEVNULL,
      env=variables,
      timeout=10,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.decode("utf-8", "replace").strip()


# ---------------------------------------------------------------- lock and status


class FolderInUse(ConfigError):
  """Another process trains in this folder."""


class Lock:
  """Holds a run folder for one process: `with Lock(workdir): …`.

  A local folder is held by `flock` on `run.lock`; the system frees it however the
  process ends. The file stays, since removing it would let two processes hold two
  files of one name. A remote folder, or a file system without `flock`, is judged by
  `status.json`: "running" with a heartbeat of the last 120 s by another process. A
  heartbeat further than that in the future comes from a wrong clock and holds nothing.

  Raises:
    FolderInUse: on entering, when another process holds the folder.
  """

  def __init__(self, workdir: str | os.PathLike):
    self.workdir = resolve(workdir)
    self._file = None

  def __enter__(self):
    try:
      self.workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
      raise ConfigError(
        f"workdir={os.fspath(self.workdir)!r}: a file is in the way; expected a folder"
      ) from None
    if is_remote(self.workdir):
      self._refuse_if(_beating(self.workdir))
      return self
    file = open(os.fspath(self.workdir / "run.lock"), "a+b")  # noqa: SIM115
    try:
      free = _flock(file, attempts=5)
    except (ImportError, OSError):  # no flock on this system, or this file system
      file.close()
      self._refuse_if(_beating(self.workdir))
      return self
    if not free:
      with file:
        self._refuse_if(_read_holder(file))
    file.truncate(0)
    file.write(
      json.dumps(
        {
          "schema": SCHEMAS["run.lock"],
          "pid": os.getpid(),
          "host": socket.gethostname(),
          "since": _now(),
        }
      ).encode()
    )
    file.flush()
    self._file = file
    # A forked worker shares the lock and would hold it after the death of its parent.
    os.register_at_fork(after_in_child=self._close)
    for left in self.workdir.iterdir():  # by a kill inside `write_json`
      if left.name.startswith(".") and left.name.endswith(".tmp"):
        left.unlink(missing_ok=True)
    return self

  def __exit__(self, *error):
    self._close()

  def _close(self):
    if self._file is not None:
      self._file.close()
      self._file = None

  def _refuse_if(self, holder):
    if holder is not None:
      raise FolderInUse(
        f"{os.fspath(self.workdir)} is in use by process {holder['pid']} on "
        f"{holder['host']} since {holder['since']}; wait for it, stop it, or choose "
        "another workdir"
      )


def holder(workdir: str | os.PathLike) -> dict[str, Any] | None:
  """Returns {"pid", "host", "since", …} of the process that trains here, or None.

  A run that was killed is gone at once; in a remote folder, after 120 s.
  """
  path = resolve(workdir)
  if is_remote(path):
    return _beating(path)
  try:
    with open(os.fspath(path / "run.lock"), "rb") as file:
      return None if _flock(file, attempts=1, shared=True) else _read_holder(file)
  except FileNotFoundError:
    return None
  except (ImportError, OSError):
    return _beating(path)


def _beating(workdir: epath.Path) -> dict[str, Any] | None:
  """Returns the other process whose heartbeat in status.json is fresh, or None."""
  status = read_status(workdir)
  if status is None or status["state"] != "running":
    return None
  if (status["pid"], status["host"]) == (os.getpid(), socket.gethostname()):
    return None
  beat = datetime.datetime.fromisoformat(status["heartbeat"])
  age = (datetime.datetime.now(datetime.UTC) - beat).total_seconds()
  if abs(age) >= HEARTBEAT_LIMIT:
    return None
  return {**status, "since": status["started"]}


def _flock(file, attempts: int, shared: bool = False) -> bool:
  """Tries to lock; True on success. Several attempts, since `holder` of some other
  process holds a shared lock for a moment."""
  import fcntl  # not on Windows

  kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
  for attempt in range(attempts):
    try:
      fcntl.flock(file, kind | fcntl.LOCK_NB)
      return True
    except BlockingIOError:
      if attempt + 1 < attempts:
        time.sleep(0.05)
  return False


def _read_holder(file) -> dict[str, Any]:
  file.seek(0)
  try:
    return json.loads(file.read().decode("utf-8"))
  except ValueError:  # taken this very moment, not written yet
    return {"pid": "unknown", "host": "unknown", "since": "just now"}


class Status:
  """Writes status.json: how far the run is, and that its process lives."""

  def __init__(self, workdir: str | os.PathLike):
    self.path = resolve(workdir) / "status.json"
    self._started = _now()
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
    now = time.monotonic()
    recent = now - self._last_time < STATUS_EVERY
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
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": self._started,
        "heartbeat": _now(),
      },
    )
    self._last_state, self._last_time = state, now


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
    self._wandb = _Wandb(self.workdir, wandb, self._members) if wandb else None
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
    self._board = None
    if tensorboard:
      self._board = _Board(self.workdir, self._members, self._start)

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
    if self._board:
      self._board.write(step, numbers, row.get("member"))
    if self._wandb:
      self._wandb.write(step, numbers, row.get("member"))

  def flush(self) -> None:
    """Makes every row durable; call it before a checkpoint is saved."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())
    elif self._dirty:
      self._write_remote()
    if self._board:
      self._board.flush()

  def close(self) -> None:
    self.flush()
    if self._file is not None:
      self._file.close()
      self._file = None
    self._lines = None
    if self._board:
      self._board.close()
      self._board = None
    if self._wandb:
      self._wandb.close()
      self._wandb = None

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

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
      raise ValueError(
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


class _Board:
  """Event files of TensorBoard, one folder a member.

  Written through tensorboardX's record layer: its `SummaryWriter` needs two threads
  and a pipe for each member, and its `flush` does not wait for them.
  """

  def __init__(self, workdir, members, start_step):
    from tensorboardX import event_file_writer, record_writer
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._session = event_pb2.Event, event_pb2.SessionLog
    self._summary = summary_pb2.Summary
    if is_remote(workdir):
      # The library knows gs and s3 through packages of their own; we go through epath.
      for scheme in _REMOTE:
        record_writer.register_writer_factory(scheme, _RemoteEvents)
    folders = [workdir / "tensorboard"]
    if members:
      folders = [
        folders[0] / f"{k:03d}_{re.sub(r'[^A-Za-z0-9=.,+-]+', '_', name)[:80]}"
        for k, name in enumerate(members)
      ]
    self._writers = []
    self._flushed = time.monotonic()
    for folder in folders:
      record_writer.directory_check(os.fspath(folder))
      # The library's own name has seconds only: a quick restart would overwrite.
      writer = event_file_writer.EventsWriter(
        os.fspath(folder / "events"), f".{uuid.uuid4().hex[:12]}"
      )
      # TensorBoard forgets what a killed run wrote from this step on.
      session = self._session(status=self._session.START)
      first = start_step + 1 if start_step else 0
      event = self._event(step=first, session_log=session)
      event.wall_time = time.time()
      writer.write_event(event)
      self._writers.append(writer)

  def write(self, step, numbers, member):
    values = [
      self._summary.Value(tag=name, simple_value=_single(value))
      for name, value in numbers.items()
    ]
    event = self._event(step=step, summary=self._summary(value=values))
    event.wall_time = time.time()
    self._writers[member or 0].write_event(event)
    if time.monotonic() - self._flushed >= BOARD_EVERY:
      self.flush()

  def flush(self):
    for writer in self._writers:
      writer.flush()
    self._flushed = time.monotonic()

  def close(self):
    for writer in self._writers:
      writer.close()


def _single(value: float) -> float:
  """float32 has no more than this; protobuf refuses or rounds by version."""
  return max(min(value, 3.4028234e38), -3.4028234e38) if math.isfinite(value) else value


class _RemoteEvents:
  """An event file on an object store: rewritten as a whole at each flush."""

  @classmethod
  def open(cls, path):
    return cls(path)

  @staticmethod
  def directory_check(path):
    epath.Path(path).mkdir(parents=True, exist_ok=True)

  def __init__(self, path):
    self._path = epath.Path(path)
    self._parts = []

  def write(self, content: bytes):
    self._parts.append(content)

  def flush(self):
    self._path.write_bytes(b"".join(self._parts))

  def close(self):
    self.flush()


class _Wandb:
  """A Weights & Biases run that goes on when the folder's run does."""

  def __init__(self, workdir, project, members):
    try:
      library = importlib.import_module("wandb")
      start = library.init  # a mere folder ./wandb imports too, but is empty
    except (ImportError, AttributeError):
      raise ConfigError(
        f"wandb={project!r}: the package is missing; try pip install wandb, or leave "
        "the option out"
      ) from None
    self._members = members
    local = None if is_remote(workdir) else os.fspath(workdir)
    if local:
      os.makedirs(local, exist_ok=True)
    path = workdir / "wandb.json"
    if not path.exists():
      write_json(path, {"schema": SCHEMAS["wandb.json"], "id": uuid.uuid4().hex[:16]})
    self._run = start(
      project=project,
      name=workdir.name,
      id=read_json(path, SCHEMAS["wandb.json"])["id"],
      dir=local,
      resume="allow",
    )
    # W&B drops rows whose own step goes back, as after a kill; so the step is a value.
    self._run.define_metric("*", step_metric="step")

  def write(self, step, numbers, member):
    prefix = "" if member is None else f"{self._members[member]}/"
    self._run.log({"step": step, **{prefix + k: v for k, v in numbers.items()}})

  def close(self):
    self._run.finish()


# ---------------------------------------------------------------- progress


class Progress:
  """Shows how far a run is, on stderr.

  On a terminal a bar with loss, accuracy, images/s and the time left; elsewhere a
  plain line for the first and the last update and at most every `every` seconds.

  Args:
    total: steps of the whole run.
    start: steps done already.
    every: seconds between plain lines.
  """

  def __init__(self, total: int, start: int = 0, every: float = 30.0):
    self._total = int(total)
    self._every = every
    self._bar = None
    self._pending = None
    self._last_line = -math.inf
    self._first = None
    if _is_terminal(sys.stderr):
      import tqdm

      with _lost_reader():
        self._bar = tqdm.tqdm(
          total=self._total,
          initial=int(start),
          file=sys.stderr,
          unit="step",
          dynamic_ncols=True,
        )

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Shows `step` (steps done) and, of `values`, what a person wants to see."""
    now = time.monotonic()
    text = _summary(values)
    if self._bar is not None:
      with _lost_reader():
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(step) - self._bar.n)
      return
    if self._first is None:
      self._first = (now, step)
    line = f"step {step}/{self._total}" + (f"  {text}" if text else "")
    since, begun = self._first
    if step > begun:
      seconds = (now - since) / (step - begun) * (self._total - step)
      line += f"  {_duration(seconds)} left"
    if step >= self._total or now - self._last_line >= self._every:
      self._print(line, now)
    else:
      self._pending = line

  def note(self, text: str) -> None:
    """Prints a line, above the bar where there is one."""
    if self._bar is not None:
      with _lost_reader():
        self._bar.write(text, file=self._bar.fp)
    else:
      self._print(text, self._last_line)

  def close(self) -> None:
    if self._bar is not None:
      with _lost_reader():
        self._bar.close()
      self._bar = None
    elif self._pending is not None:
      self._print(self._pending, self._last_line)

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def _print(self, line, now):
    self._last_line, self._pending = now, None
    with _lost_reader():
      print(line, file=sys.stderr, flush=True)


def _lost_reader():
  """A closed terminal or pipe is no reason to stop training."""
  return contextlib.suppress(OSError, ValueError)


def _is_terminal(stream) -> bool:
  try:
    return stream.isatty()
  except (AttributeError, ValueError):  # no stream, or a closed one
    return False


def _summary(values: Mapping[str, float]) -> str:
  shown = (
    ("train/loss", "loss {:.4f}"),
    ("train/accuracy", "accuracy {:.4f}"),
    ("time/images_per_second", "{:.0f} images/s"),
  )
  return "  ".join(f.format(float(values[k])) for k, f in shown if k in values)


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}"

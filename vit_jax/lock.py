"""One process a run folder: `Lock` holds it, `holder` says who does."""

import datetime
import json
import os
import socket
import time
from typing import Any

from etils import epath

from vit_jax import records
from vit_jax.config import ConfigError

# A heartbeat older than this is that of a dead process (remote folders), in seconds.
HEARTBEAT_LIMIT = 120.0


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
    self.workdir = records.resolve(workdir)
    self._file = None

  def __enter__(self):
    try:
      self.workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
      raise ConfigError(
        f"workdir={os.fspath(self.workdir)!r}: a file is in the way; expected a folder"
      ) from None
    if records.is_remote(self.workdir):
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
          "schema": records.SCHEMAS["run.lock"],
          "pid": os.getpid(),
          "host": socket.gethostname(),
          "since": records.now(),
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
  path = records.resolve(workdir)
  if records.is_remote(path):
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
  status = records.read_status(workdir)
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

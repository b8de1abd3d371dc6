"""Other places that metrics go to: TensorBoard files and Weights & Biases.

Each class has one signature: `write(step, numbers, member)`, `flush()`, `close()`, with
`numbers` a mapping from name to float, and `member` None in a run alone. `metrics.jsonl`
stays the source of truth; `records.Metrics` checks a row and hands it on to these.
"""

import contextlib
import importlib
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence

from etils import epath

from vit_jax.config import ConfigError

# Event files are handed to the system at most this often, in seconds.
TENSORBOARD_EVERY = 30.0

# Largest float32; protobuf refuses or rounds what is larger, by version.
_LARGEST = 3.4028234e38


class TensorBoard:
  """Event files of TensorBoard, one folder a member.

  Written through tensorboardX's record layer: its `SummaryWriter` needs two threads
  and a pipe for each member, and its `flush` does not wait for them.

  Args:
    folder: where they go, local or remote.
    members: names of the members; None: a run alone.
    start_step: step that the run goes on from; 0: from the start.
  """

  def __init__(
    self, folder: epath.Path, members: Sequence[str] | None, start_step: int
  ):
    with _absent("torch"):  # seconds; the part of tensorboardX that we use needs none
      from tensorboardX import event_file_writer, record_writer
      from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    scheme, separator, _ = os.fspath(folder).partition("://")
    if separator:
      # The library knows gs and s3 through packages of their own; we go through epath.
      record_writer.register_writer_factory(scheme, _RemoteEvents)
    folders = [folder]
    if members:
      folders = [
        folder / f"{k:03d}_{re.sub(r'[^A-Za-z0-9=.,+-]+', '_', name)[:80]}"
        for k, name in enumerate(members)
      ]
    # TensorBoard forgets what a killed run wrote from this step on.
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    first = start_step + 1 if start_step else 0
    self._writers = []
    for place in folders:
      record_writer.directory_check(os.fspath(place))
      # The library's own name has seconds only: a quick restart would overwrite.
      writer = event_file_writer.EventsWriter(
        os.fspath(place / "events"), f".{uuid.uuid4().hex[:12]}"
      )
      writer.write_event(
        self._event(step=first, session_log=session, wall_time=time.time())
      )
      self._writers.append(writer)
    self._flushed = time.monotonic()

  def write(self, step: int, numbers: Mapping[str, float], member: int | None) -> None:
    values = [
      self._summary.Value(tag=name, simple_value=_single(value))
      for name, value in numbers.items()
    ]
    event = self._event(
      step=step, summary=self._summary(value=values), wall_time=time.time()
    )
    self._writers[member or 0].write_event(event)
    if time.monotonic() - self._flushed >= TENSORBOARD_EVERY:
      self.flush()

  def flush(self) -> None:
    for writer in self._writers:
      writer.flush()
    self._flushed = time.monotonic()

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


@contextlib.contextmanager
def _absent(module: str):
  """Lets an optional import of a module fail, unless it was imported before."""
  if module in sys.modules:
    yield
    return
  sys.modules[module] = None
  try:
    yield
  finally:
    del sys.modules[module]


def _single(value: float) -> float:
  return max(min(value, _LARGEST), -_LARGEST) if math.isfinite(value) else value


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


class WandB:
  """A Weights & Biases run that goes on when the folder's run does.

  Args:
    project: its name.
    name: shown for the run.
    run_id: the same again makes W&B go on with the run.
    folder: local folder of its files, made if missing; None: where it likes.
    members: names of the members, put before the names of metrics; None: a run alone.

  Raises:
    ConfigError: the package is missing.
  """

  def __init__(
    self,
    project: str,
    name: str,
    run_id: str,
    folder: str | None,
    members: Sequence[str] | None,
  ):
    try:
      library = importlib.import_module("wandb")
      start = library.init  # a mere folder ./wandb imports too, but is empty
    except (ImportError, AttributeError):
      raise ConfigError(
        f"wandb={project!r}: the package is missing; try pip install wandb, or leave "
        "the option out"
      ) from None
    if folder:
      os.makedirs(folder, exist_ok=True)
    self._members = members
    self._run = start(project=project, name=name, id=run_id, dir=folder, resume="allow")
    # W&B drops rows whose own step goes back, as after a kill; so the step is a value.
    self._run.define_metric("*", step_metric="step")

  def write(self, step: int, numbers: Mapping[str, float], member: int | None) -> None:
    prefix = "" if member is None else f"{self._members[member]}/"
    self._run.log({"step": step, **{prefix + k: v for k, v in numbers.items()}})

  def flush(self) -> None:
    """Nothing: the library sends rows by itself."""

  def close(self) -> None:
    self._run.finish()

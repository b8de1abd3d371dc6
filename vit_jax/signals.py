"""Signals that mean something else for a while."""

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handled(
  handler: Callable[[str], None], *numbers: signal.Signals
) -> Iterator[dict[signal.Signals, object]]:
  """Within this context, `handler(name)` is called when one of the signals comes.

  Args:
    handler: takes the name, such as `"SIGTERM"`.
    numbers: the signals.

  Yields:
    The handlers of before, which come back at the end; nothing of all this outside the
    main thread, where signals are the caller's business.
  """

  def call(number, _):
    handler(signal.Signals(number).name)

  try:
    old = {number: signal.signal(number, call) for number in numbers}
  except ValueError:
    yield {}
    return
  try:
    yield old
  finally:
    for number, before in old.items():
      signal.signal(number, before)

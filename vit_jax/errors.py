"""How a run may end early, apart from bad input (`config.ConfigError`), and how messages
tell long lists."""


class Stopped(Exception):
  """The run was asked to stop (SIGTERM or Ctrl-C) and has saved what there was."""


class Diverged(Exception):
  """A loss or gradient was not finite; the last good checkpoint stays."""


def listed(items, most: int = 10) -> str:
  """Returns the first few items, and how many more there are."""
  items = [str(item) for item in items]
  more = f" and {len(items) - most} more" if len(items) > most else ""
  return (", ".join(items[:most]) + more) or "none"

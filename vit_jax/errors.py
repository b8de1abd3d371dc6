"""How a run may end early, apart from bad input (`config.ConfigError`)."""


class Stopped(Exception):
  """The run was asked to stop (SIGTERM or Ctrl-C) and has saved its state."""


class Diverged(Exception):
  """A loss or gradient was not finite; the last good checkpoint stays."""

"""What a run ran on: versions, commit, devices; and what changed when it went on."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from vit_jax import records

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


def environment() -> dict[str, Any]:
  """Returns what the run ran on: the content of environment.json.

  Imports JAX and starts its backends: call it after `jax.distributed.initialize`.
  """
  import jax

  devices = jax.devices()
  return {
    "schema": records.SCHEMAS["environment.json"],
    "python": platform.python_version(),
    "platform": platform.platform(),
    "host": socket.gethostname(),
    "packages": {name: version(name) for name in PACKAGES},
    "git": _git(),
    "devices": {
      "platform": devices[0].platform,
      "kind": devices[0].device_kind,
      "count": len(devices),
      "processes": jax.process_count(),
    },
    "command": list(sys.argv),
    "started": records.now(),
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


def version(package: str) -> str | None:
  """Returns the version of an installed package, None if it is not there."""
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

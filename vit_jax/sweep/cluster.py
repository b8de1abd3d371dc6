"""The groups of a sweep as tasks of a Ray cluster (extra `ray`).

Every machine of the cluster must see the folder of the sweep under the same path. A
group whose worker dies is started again, elsewhere if need be, and goes on from its last
checkpoint.
"""

import os
import signal
import sys
from collections.abc import Mapping

from vit_jax import records, signals
from vit_jax.config import ConfigError
from vit_jax.errors import Stopped
from vit_jax.sweep import launch

RETRIES = 3  # of a group whose worker died


def run(folder, address: str | None, resources: Mapping[str, float]) -> list[str]:
  """Runs the groups that are not done, as many at once as the cluster has room for.

  Args:
    folder: of the sweep.
    address: of a running cluster; None: one of this machine alone, made for now.
    resources: what a group takes: `CPU`, `GPU`, or what the cluster calls its own.

  Returns:
    The groups that failed.

  Raises:
    ConfigError: Ray is missing or cannot be reached, or has not so much.
    Stopped: by SIGTERM or Ctrl-C; what runs is saved as far as its last checkpoint.
  """
  try:
    import ray
  except ImportError:
    raise ConfigError("Ray is missing; pip install -e '.[ray]'") from None
  waiting = [
    g.id for g in launch.read(folder) if launch.state(folder, g)["state"] != "done"
  ]
  try:
    ray.init(address=address, logging_level="error", include_dashboard=False)
  except (ConnectionError, ValueError) as error:
    raise ConfigError(f"--address={address}: {error}") from None
  try:
    return _all(ray, os.fspath(records.resolve(folder)), waiting, dict(resources))
  finally:
    ray.shutdown()


def _all(ray, folder, waiting, resources):
  _check_room(ray.cluster_resources(), resources)
  # A worker of its own for each group: what JAX holds goes with its process.
  task = ray.remote(max_calls=1)(_run_group).options(
    num_cpus=resources.pop("CPU", 1),
    num_gpus=resources.pop("GPU", 0),
    resources=resources,
    max_retries=RETRIES,
  )
  running = {task.remote(folder, name): name for name in waiting}
  failed = []
  with signals.handled(_stop, signal.SIGTERM, signal.SIGINT):
    while running:
      (ready, *_), _ = ray.wait(list(running))
      name = running.pop(ready)
      try:
        ray.get(ready)
      except ray.exceptions.RayError as error:
        failed.append(name)
        launch.note_failure(launch.run_folder(folder, name), str(error))
        print(f"group {name} failed; the others go on", file=sys.stderr)
  return failed


def _stop(name):
  raise Stopped(f"{name}; the same command goes on")


def _check_room(has, resources):
  for name, amount in resources.items():
    if amount > has.get(name, 0):
      raise ConfigError(
        f"a group takes {name}={amount:g}, the cluster has {has.get(name, 0):g}; see "
        "--resources"
      )


def _run_group(folder, name):
  """What a worker does."""
  from vit_jax import command

  command.prepare_jax()
  launch.run_group(folder, name)


def resources(text: str) -> dict[str, float]:
  """Returns what "CPU=2,GPU=1" says.

  Raises:
    ConfigError: it says something else.
  """
  found = {}
  for part in filter(None, text.split(",")):
    name, _, amount = part.partition("=")
    try:
      found[name.strip()] = float(amount)
    except ValueError:
      raise ConfigError(
        f"--resources={text}: expected NAME=NUMBER, as in CPU=2,GPU=1"
      ) from None
  return found

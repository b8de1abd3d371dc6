"""Runs a sweep: many trainings that differ in a few settings.

    python scripts/sweep.py --sweep configs/sweeps/lr_digits.py --workdir runs/lr --dry_run
    python scripts/sweep.py --sweep configs/sweeps/lr_digits.py --workdir runs/lr
    python scripts/sweep.py --workdir runs/lr --status

A sweep file has get_config(), what all trials share, and get_sweep(), a list of overrides
(`vit_jax/sweep/space.py`) or a search (`vit_jax/sweep/search.py`). What is done is not
done again: the same command goes on.
"""

import shlex
import sys

from absl import flags

from vit_jax import command, config, config_files

command.define_settings()
flags.DEFINE_string("sweep", None, "file with get_config() and get_sweep()")
flags.DEFINE_string(
  "workdir", None, "folder of the sweep; one that exists is gone on with"
)
flags.DEFINE_enum(
  "launcher",
  "here",
  ["here", "ray", "commands"],
  "run the groups here or on a Ray cluster, or print a command for each",
)
flags.DEFINE_integer("at_once", 1, "groups that run here at a time, as processes")
flags.DEFINE_string("address", None, "of a Ray cluster; else one of this machine")
flags.DEFINE_string("resources", "CPU=1", "that a group takes of it, as in CPU=4,GPU=1")
flags.DEFINE_bool("dry_run", False, "print the plan, and stop")
flags.DEFINE_bool("status", False, "print how far the sweep is, and stop")
flags.DEFINE_string("group", None, "run this group only, in this process")


def main(arguments):
  f = flags.FLAGS
  if arguments:
    raise command.ConfigError(f"unexpected {arguments}; see --help")
  if not f.dry_run:
    command.required("workdir")
  command.prepare_jax()
  from vit_jax.sweep import launch, overview, search

  if f.status:
    print(overview.status(f.workdir))
    return
  if f.group is not None:
    launch.run_group(f.workdir, f.group)
    return
  if f.sweep is not None:
    base, space = config_files.read_sweep(f.sweep)
    base = config.override(base, command.changed_settings())
    if isinstance(space, search.Search):
      _search(base, space)
      return
    groups = launch.make(f.workdir, base, space, write=not f.dry_run)
  else:
    if command.changed_settings():
      raise command.ConfigError("settings change what --sweep says; it is missing")
    groups = launch.read(command.required("workdir"))
  if f.launcher == "commands":
    for group in groups:
      if launch.state(f.workdir, group)["state"] != "done":
        print(shlex.join(launch.command(__file__, f.workdir, group.id)))
    return
  print(overview.plan(f.workdir, groups))
  if f.dry_run:
    return
  _end(_go())


def _go():
  """Runs what is missing; returns the groups that failed."""
  from vit_jax.sweep import cluster, local

  f = flags.FLAGS
  if f.launcher == "ray":
    return cluster.run(f.workdir, f.address, cluster.resources(f.resources))
  return local.run(f.workdir, __file__, f.at_once)


def _search(base, wanted):
  from vit_jax.sweep import search

  f = flags.FLAGS
  if f.dry_run or f.launcher == "commands":
    raise command.ConfigError(
      "a search proposes its trials while it runs: there is no plan to print"
    )
  _end(search.run(f.workdir, base, wanted, _go))


def _end(failed):
  from vit_jax.sweep import overview

  print(overview.status(flags.FLAGS.workdir))
  if failed:
    print(f"failed: {', '.join(failed)}", file=sys.stderr)
    sys.exit(command.FAILED)


if __name__ == "__main__":
  command.main(main, __doc__)

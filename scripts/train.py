"""Trains a model, or goes on with a run that was stopped.

    python scripts/train.py --config configs/digits.py --workdir runs/digits
    python scripts/train.py --config configs/digits.py --dry_run \\
        --config.model.patch=4 --config.model.stride=2 --config.model.pad=1
"""

from absl import flags

from vit_jax import command

command.define_config()
flags.DEFINE_string("workdir", None, "run folder; one that was stopped is gone on with")
flags.DEFINE_bool("dry_run", False, "print what the run would be, and stop")
flags.DEFINE_bool("deterministic", False, "repeatable operations on a GPU, slower")
flags.DEFINE_bool("profile", False, "write a trace of a few steps to WORKDIR/profile")
flags.DEFINE_string("wandb", None, "log to this Weights & Biases project as well")
flags.DEFINE_string("coordinator", None, "host:port of the first of several processes")
flags.DEFINE_integer("processes", None, "number of processes; alone: ask the cluster")
flags.DEFINE_integer("process", None, "number of this process, from 0")


def main(arguments):
  f = flags.FLAGS
  if arguments:
    raise command.ConfigError(
      f"unexpected {arguments}; settings are --config.NAME=VALUE"
    )
  config = command.parsed_config()
  if not f.dry_run:
    command.required("workdir")
  command.prepare_jax(f.deterministic)
  from vit_jax import devices, train

  devices.initialize(f.coordinator, f.processes, f.process)
  if f.dry_run:
    from vit_jax import summary

    print(summary.text(train.prepare(config)))
    return
  result = train.run(config, f.workdir, wandb=f.wandb, profile=f.profile)
  for name, metrics in result.items():
    scores = [
      f"{k} {v:.4f}" for k, v in metrics.items() if k.startswith(("val", "test"))
    ]
    label = f"member {name}: " if len(result) > 1 else ""
    print(f"{label}{'  '.join(scores)}")
  print(f"next: python scripts/evaluate.py --workdir {f.workdir!r}")


if __name__ == "__main__":
  command.main(main, __doc__)

"""Times vit_jax beside what people would take instead, and the limit of the machine.

    pip install -e '.[bench]'
    python scripts/benchmark.py train --size=reference --out=benchmarks

What can be timed: train and eval (steps of a model), attention (operators), data
(reading pictures), startup (import, --help, the first step), overhead (what a run does
beside its steps), population (eight members in one program). Every contender has a
process of its own, and they take turns; what counts are ratios, turn by turn. Peers that
are not installed are left out with a word. Results: a table, and with --out a JSON file,
the table in Markdown and a figure. docs/speed.md holds what was found.
"""

from absl import flags

from vit_jax import command
from vit_jax.bench import models, report

flags.DEFINE_string("size", "reference", "train, eval: reference, overlap, vit_s16 ...")
flags.DEFINE_integer("rounds", 7, "rounds of each contender", lower_bound=1)
flags.DEFINE_integer("steps", 8, "steps of a round", lower_bound=1)
flags.DEFINE_list("peers", None, "names of the peers; all, unless given")
command.define_settings()
flags.DEFINE_string("out", None, "folder for the results")


def _step(what):
  f = flags.FLAGS
  return models.run(
    what,
    size=f.size,
    rounds=f.rounds,
    steps=f.steps,
    changes=command.changed_settings(),
    only=f.peers,
  )


SUBJECTS = {
  "train": lambda: _step("train"),
  "eval": lambda: _step("eval"),
}


def main(arguments):
  if len(arguments) != 1 or arguments[0] not in SUBJECTS:
    raise command.ConfigError(
      f"what to time: {' '.join(arguments) or 'nothing'}; expected one of "
      f"{', '.join(SUBJECTS)}"
    )
  report.write(SUBJECTS[arguments[0]](), flags.FLAGS.out)


if __name__ == "__main__":
  command.main(main, __doc__)

"""Times vit_jax beside what people would take instead, and the limit of the machine.

    pip install -e '.[bench,plots]'
    python scripts/benchmark.py train --size=reference --out=benchmarks

| what | it times |
|---|---|
| train | training steps of a model (--size), beside timm, vit-pytorch, equimo, plain Flax |
| eval | evaluation of batches of it, beside the same |
| attention | the operators, forward and backward, over --tokens |
| data | reading JPEG files, beside PyTorch's loader and decoding alone |
| startup | imports, --help, the first step; all compiled before, and nothing |
| overhead | what a run of digits does beside its steps |
| population | eight seeds in one program against eight runs, of --lengths |
| recipe | configs/fashion_mnist.py to --target, beside the same recipe in PyTorch |

Every contender has a process of its own, and they take turns; what counts are ratios,
turn by turn, stated as median (least to most). Peers that are not installed are left
out with a word. The result is a table; with --out also NAME.json (every reading, machine,
versions, commit), NAME.md and, with matplotlib, NAME.png. docs/speed.md holds what was
found. Made for CPUs: memory is that of the host.
"""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

from absl import flags

from vit_jax import command, config
from vit_jax.bench import report, sizes

flags.DEFINE_enum("size", "reference", list(sizes.SIZES), "train, eval: the model")
flags.DEFINE_integer(
  "rounds", 7, "turns that each contender takes; recipe: races, 1 unless given", 1
)
flags.DEFINE_integer("steps", 8, "train, eval: steps of a turn", lower_bound=1)
flags.DEFINE_list("peers", None, "train, eval: names of the peers; all, unless given")
flags.DEFINE_list("tokens", ["65", "257", "1025"], "attention: lengths of sequences")
flags.DEFINE_list("lengths", ["5 epochs", "20 epochs"], "population: of the runs")
flags.DEFINE_float("target", 92, "recipe: test accuracy in %", 0, 100)
flags.DEFINE_string("recipe_length", "30 epochs", "recipe: its schedule follows it")
flags.DEFINE_string("out", None, "folder for the results")
command.define_settings()


def _model_steps(what):
  from vit_jax.bench import model_steps

  f = flags.FLAGS
  return model_steps.run(
    what,
    size=f.size,
    rounds=f.rounds,
    steps=f.steps,
    changes=command.changed_settings(),
    only=f.peers,
  )


def _attention():
  from vit_jax.bench import operators

  tokens = flags.FLAGS.tokens
  if not all(n.isdecimal() and int(n) for n in tokens):
    raise command.ConfigError(f"--tokens={','.join(tokens)}: expected numbers above 0")
  return operators.run([int(n) for n in tokens], flags.FLAGS.rounds)


def _data():
  from vit_jax.bench import pipeline

  return pipeline.run(flags.FLAGS.rounds)


def _startup():
  from vit_jax.bench import startup

  return startup.run(flags.FLAGS.rounds)


def _overhead():
  command.prepare_jax()
  from vit_jax.bench import overhead

  return overhead.run(command.changed_settings(), flags.FLAGS.rounds)


def _population():
  from vit_jax.bench import populations

  return populations.run(flags.FLAGS.lengths, flags.FLAGS.rounds)


def _recipe():
  from vit_jax.bench import recipes

  f = flags.FLAGS
  rounds = f.rounds if f["rounds"].present else 1
  return recipes.run(f.target / 100, f.recipe_length, rounds)


class Subject(NamedTuple):
  run: Callable[[], report.Result]
  reads: tuple[str, ...]  # flags besides --rounds and --out; config: --config.NAME


_OF_MODELS = ("size", "steps", "peers", "config")
SUBJECTS = {
  "train": Subject(lambda: _model_steps("train"), _OF_MODELS),
  "eval": Subject(lambda: _model_steps("eval"), _OF_MODELS),
  "attention": Subject(_attention, ("tokens",)),
  "data": Subject(_data, ()),
  "startup": Subject(_startup, ()),
  "overhead": Subject(_overhead, ("config",)),
  "population": Subject(_population, ("lengths",)),
  "recipe": Subject(_recipe, ("target", "recipe_length")),
}


def main(arguments):
  if len(arguments) != 1 or arguments[0] not in SUBJECTS:
    given = " ".join(arguments)
    hint = config.nearest(given, SUBJECTS) if given else f": {', '.join(SUBJECTS)}"
    raise command.ConfigError(f"what to time: {given or 'nothing'}{hint}")
  subject, out = arguments[0], flags.FLAGS.out
  _check_flags(subject)
  if out:  # now, not after the measurements
    pathlib.Path(out).mkdir(parents=True, exist_ok=True)
  report.write(SUBJECTS[subject].run(), out)


def _check_flags(subject):
  """Refuses flags that this subject does not read."""
  known = {name for other in SUBJECTS.values() for name in other.reads} - {"config"}
  given = [name for name in sorted(known) if flags.FLAGS[name].present]
  given += ["config"] if command.changed_settings() else []
  for name in given:
    if name not in SUBJECTS[subject].reads:
      flag = "config.NAME" if name == "config" else name
      raise command.ConfigError(f"{subject} does not read --{flag}; leave it out")


if __name__ == "__main__":
  command.main(main, __doc__)

"""Writes what a sweep found: tables, tests, figures, and what can be claimed.

python scripts/report.py --workdir runs/overlap --by arm --within train.length
python scripts/report.py --workdir runs/lr --by optim.lr --metric val/accuracy
python scripts/report.py --workdir runs/cifar10 --by arm --tune optim.lr
"""

from absl import flags

from vit_jax import command

flags.DEFINE_string("workdir", None, "folder of the sweep")
flags.DEFINE_string("by", None, "what makes an arm: settings, or 'arm' (by commas)")
flags.DEFINE_string("within", "", "settings whose values are reported apart")
flags.DEFINE_string("pair", "seed", "setting by which trials of two arms are paired")
flags.DEFINE_string("metric", "test/accuracy", "whose last value counts")
flags.DEFINE_string("against", None, "arm to compare with; else the first")
flags.DEFINE_float("band", None, "differences up to this count as none")
flags.DEFINE_string("tune", None, "setting of which each arm has its best value")
flags.DEFINE_string("tune_metric", "val/accuracy", "that chooses that value")
flags.DEFINE_string("out", None, "folder; else WORKDIR/report")


def main(arguments):
  f = flags.FLAGS
  if arguments:
    raise command.ConfigError(f"unexpected {arguments}; see --help")
  workdir, by = command.required("workdir"), command.required("by")
  from vit_jax.sweep import report

  question = report.Question(
    by=report.parts(by),
    within=report.parts(f.within),
    pair=f.pair,
    metric=f.metric,
    against=f.against,
    band=f.band,
    tune=f.tune,
    tune_metric=f.tune_metric,
  )
  file = report.write(workdir, question, f.out)
  print(file.read_text())
  print(f"written to {file.parent}")


if __name__ == "__main__":
  command.main(main, __doc__)

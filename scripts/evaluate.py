"""Evaluates a checkpoint on a whole split and writes the result to its run folder.

python scripts/evaluate.py --workdir runs/digits
python scripts/evaluate.py --workdir runs/digits --step best --split val --ema
python scripts/evaluate.py --workdir runs/digits --pictures my_pictures
"""

from absl import flags

from vit_jax import command

command.define_run(split=True)


def main(arguments):
  f = flags.FLAGS
  if arguments:
    raise command.ConfigError(f"unexpected {arguments}; the run is named by --workdir")
  workdir = command.required("workdir")
  command.prepare_jax()
  from vit_jax import evaluate, records

  result = evaluate.run(
    workdir,
    step=f.step,
    ema=f.ema,
    member=f.member,
    split=f.split,
    data_dir=f.data_dir,
    pictures=f.pictures,
  )
  if f.out:
    records.write_json(f.out, result)
  for name, value in result.items():
    if name not in ("schema", "confusion", "per_class"):
      print(f"{name:18} {value}")
  print(f"written to {evaluate.path(result, workdir)}")
  if f.out:
    print(f"written to {f.out}")


if __name__ == "__main__":
  command.main(main, __doc__)

"""Says what is on pictures, with a trained model.

python scripts/predict.py --workdir runs/digits picture.png more/*.jpg
"""

import sys

from absl import flags

from vit_jax import command

command.define_run()
flags.DEFINE_integer("top", 5, "classes to name for each picture", lower_bound=1)


def main(arguments):
  f = flags.FLAGS
  workdir = command.required("workdir")
  if not arguments:
    raise command.ConfigError("no pictures; name files after the flags")
  command.prepare_jax()
  from vit_jax import predict, records

  found, failed = predict.run(
    workdir, arguments, step=f.step, ema=f.ema, member=f.member, top=f.top
  )
  for item in found:
    best = "  ".join(
      f"{p['class']} {p['probability']:.4f}" for p in item["predictions"]
    )
    print(f"{item['file']}  {best}")
  if f.out:
    records.write_json(f.out, {"schema": 1, "pictures": found, "failed": failed})
  for file, reason in failed.items():
    print(f"error: {file}: {reason}", file=sys.stderr)
  if failed:
    sys.exit(command.BAD_INPUT)


if __name__ == "__main__":
  command.main(main, __doc__)

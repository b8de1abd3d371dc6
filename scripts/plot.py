"""Draws the curves of a run and how often its patches see each pixel.

python scripts/plot.py --workdir runs/digits --out digits.png
"""

from absl import flags

from vit_jax import command

flags.DEFINE_string("workdir", None, "run folder")
flags.DEFINE_string("out", None, "image file, such as digits.png")


def main(arguments):
  if arguments:
    raise command.ConfigError(f"unexpected {arguments}")
  workdir, out = command.required("workdir"), command.required("out")
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise command.ConfigError(
      "matplotlib is missing; pip install -e '.[plots]'"
    ) from None
  from vit_jax.analysis import plots

  plots.run(workdir, out)
  print(f"written to {out}")


if __name__ == "__main__":
  command.main(main, __doc__)

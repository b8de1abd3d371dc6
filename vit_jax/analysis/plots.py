"""Figures of a run. The only module that imports matplotlib (extra `plots`)."""

import numpy as np

from vit_jax import checkpoint, config, models, records


def run(workdir, out) -> None:
  """Writes one figure: loss, accuracy, and how often each pixel is seen.

  Args:
    workdir: run folder.
    out: image file; its ending says the format.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  rows = records.read(workdir)
  content = checkpoint.read_config(workdir)
  figure, (loss, accuracy, seen) = plt.subplots(1, 3, figsize=(10, 2.8))
  for axes, key in ((loss, "loss"), (accuracy, "accuracy")):
    for split in ("train", "val", "test"):
      points = [(r["step"], r[n]) for r in rows if (n := f"{split}/{key}") in r]
      if points:
        marker = "" if split == "train" else "o"
        axes.plot(*zip(*points), marker=marker, markersize=3, label=split)
    axes.set(xlabel="step", title=key)
    axes.legend()
  height, width, _ = content["data"]["shape"]
  geometry = models.geometry(content["config"].model, config.Pair(height, width))
  picture = seen.imshow(geometry.coverage(), vmin=0, cmap="Blues")
  y, x = geometry.centres().T
  seen.plot(x, y, ".", color="black", markersize=4)
  seen.set(title="patches over each pixel", xticks=[], yticks=[])
  figure.colorbar(picture, ticks=np.unique(geometry.coverage()))
  figure.tight_layout()
  figure.savefig(out, dpi=110)
  plt.close(figure)

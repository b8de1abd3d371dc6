"""Figures of a run. The only module that imports matplotlib (extra `plots`)."""

import pathlib

import numpy as np

from vit_jax import checkpoint, config, models, records


def run(workdir, out) -> None:
  """Writes one figure: loss, accuracy, and how often each pixel is seen.

  Args:
    workdir: run folder.
    out: image file; its ending says the format.

  Raises:
    ConfigError: no such run, or no such format.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  out = pathlib.Path(out)
  formats = sorted(FigureCanvasAgg.get_supported_filetypes())
  if out.suffix[1:].lower() not in formats:
    raise config.ConfigError(f"{out} ends in no format of {', '.join(formats)}")
  rows = records.read(workdir)
  content = checkpoint.read_config(workdir)
  figure, (loss, accuracy, seen) = plt.subplots(1, 3, figsize=(10, 2.8))
  members = sorted({r.get("member", 0) for r in rows})
  for axes, key in ((loss, "loss"), (accuracy, "accuracy")):
    for colour, split in enumerate(("train", "val", "test")):
      name, marker = f"{split}/{key}", "" if split == "train" else "o"
      for member in members:
        points = [
          (r["step"], r[name])
          for r in rows
          if r.get("member", 0) == member and name in r
        ]
        if points:
          label = split if member == members[0] else None
          axes.plot(
            *zip(*points), f"C{colour}", marker=marker, markersize=3, label=label
          )
    axes.set(xlabel="step", title=key)
    if axes.lines:
      axes.legend()
  if "geometry" in content:
    height, width, _ = content["data"]["shape"]
    geometry = models.geometry(content["config"].model, config.Pair(height, width))
    picture = seen.imshow(geometry.coverage(), vmin=0, cmap="Blues")
    y, x = geometry.centres().T
    seen.plot(x, y, ".", color="black", markersize=4)
    seen.set(title="patches over each pixel", xticks=[], yticks=[])
    figure.colorbar(picture, ticks=np.unique(geometry.coverage()))
  else:  # a model from outside
    seen.set_axis_off()
  figure.tight_layout()
  out.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(out, dpi=110)
  plt.close(figure)

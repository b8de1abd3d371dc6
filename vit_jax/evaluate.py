"""Evaluation: every example once, counted and summed, divided once at the end.

The device says of each example what the objective says (`losses`); the numbers that
people report are taken from those in float64 here, so that batch size, padding and
devices change them by the rounding of single examples at most.
"""

import dataclasses
import hashlib
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from vit_jax import checkpoint, config, devices, losses, models, optim, records, steps
from vit_jax.config import ConfigError
from vit_jax.data import batches, datasets
from vit_jax.data import folder as image_folder
from vit_jax.data.images import in_threads

SCHEMA = 1


def values(layout, params, hypers, splits, batch_size: int) -> list[dict]:
  """Returns what the objective says of every example, for each member.

  Args:
    layout: of `devices.make`.
    params: of all members, placed.
    hypers: of all members, placed.
    splits: one for each member; the same object for all, or of equal sizes.
    batch_size: examples of a step, rounded up to a multiple of the devices.

  Returns:
    A dict of [n] arrays and `label`, for each member.
  """
  count = len(splits[0])
  size = -(-min(batch_size, count) // jax.device_count()) * jax.device_count()
  shared = all(split is splits[0] for split in splits)
  parts = []
  for start in range(0, count, size):
    if shared:
      own, batch = {}, layout.put(_padded(splits[0], start, size), 0)
    else:
      padded = [_padded(split, start, size) for split in splits]
      own = layout.put(jax.tree.map(lambda *x: np.stack(x), *padded), 1)
      batch = {}
    parts.append(layout.evaluate(params, hypers, own, batch))
  parts = jax.device_get(parts)
  together = {n: np.concatenate([p[n] for p in parts], 1)[:, :count] for n in parts[0]}
  return [
    {"label": np.asarray(split.labels)} | {n: v[i] for n, v in together.items()}
    for i, split in enumerate(splits)
  ]


def _padded(split, start, size):
  stop = min(start + size, len(split))
  if batches.is_resident(split):
    images = split.images[start:stop]
  else:
    images = np.stack(in_threads(split.images.__getitem__, range(start, stop)))
  missing = size - (stop - start)
  labels = np.asarray(split.labels[start:stop], np.int32)
  return {
    "image": np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0))),
    "label": np.pad(labels, (0, missing)),
    "row": np.arange(start, start + size, dtype=np.int32),
  }


def metrics(values: dict) -> dict[str, float]:
  """Returns the numbers that are logged: of each value that the objective gives its
  mean over the examples (the labelled ones, where classes are predicted), fractions."""
  classifies = "predicted" in values
  counted = values["label"] >= 0 if classifies else slice(None)
  out = {
    name: _mean(value[counted])
    for name, value in values.items()
    if name not in ("label", "predicted", "confidence")
  }
  if classifies:
    right = values["predicted"] == values["label"]
    out = {"loss": out.pop("loss"), "accuracy": _mean(right[counted]), **out}
  return out


def report(values: dict, classes: tuple[str, ...]) -> dict[str, Any]:
  """Returns everything that `evaluate.py` writes about predictions.

  `ece` is the expected calibration error with 15 equal bins of confidence (Guo et al.
  2017); `per_class` maps a class to its accuracy (None where it has no example);
  `confusion[true][predicted]` counts examples.
  """
  known = values["label"] >= 0
  out = {"examples": int(known.sum()), "unlabelled": int((~known).sum())}
  if not known.any() and "predicted" in values:
    raise ConfigError("no example of this split has a label; predict needs none")
  out |= metrics(values)
  if "predicted" not in values:
    return out | {"examples": len(known), "unlabelled": 0}
  label, predicted = values["label"][known], values["predicted"][known]
  confusion = np.zeros((len(classes), len(classes)), np.int64)
  np.add.at(confusion, (label, predicted), 1)
  totals = confusion.sum(1)
  out["ece"] = calibration_error(values["confidence"][known], label == predicted)
  out["per_class"] = {
    name: float(confusion[i, i] / totals[i]) if totals[i] else None
    for i, name in enumerate(classes)
  }
  out["confusion"] = confusion.tolist()
  return out


def calibration_error(confidence, right, bins: int = 15) -> float:
  """Returns sum over bins of (share of examples) |accuracy - mean confidence|."""
  confidence = np.asarray(confidence, np.float64)
  right = np.asarray(right, np.float64)
  # Bin b holds confidences in (b / bins, (b + 1) / bins].
  number = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
  gaps = np.bincount(number, weights=right - confidence, minlength=bins)
  return float(np.abs(gaps).sum() / len(confidence))


def run(
  workdir,
  *,
  step="latest",
  ema: bool = False,
  member=None,
  split: str = "test",
  data_dir: str | None = None,
  pictures: str | None = None,
  model=None,
  loss=None,
  data=None,
) -> dict[str, Any]:
  """Evaluates a checkpoint and writes `evaluations/{split}-{step}.json`.

  Args:
    workdir: run folder, or a step in it.
    step, ema, member: see `vit_jax.load`.
    split: `"test"`, `"val"` or `"train"`.
    data_dir: folder of the data, where it lies elsewhere than at training.
    pictures: evaluate on other data instead: a folder of `CLASS/*.png`, classes found
      by their names among those of the run (not all of them need be there). The result
      says so, and its file is `evaluations/pictures-{folder}-{step}.json` with the
      folder's name and a hash of its path.
    model, loss, data: parts from outside the package, as given to `train.run`.

  Returns:
    What was written.

  Raises:
    ConfigError: no such run, step, member or split, or other data than at training.
  """
  params, content, number = checkpoint.load_params(
    workdir, step=step, ema=ema, member=member
  )
  folder, _ = checkpoint.find(workdir, number)
  run_config = content["config"]
  if data_dir is not None:
    run_config = config.override(run_config, {"data.dir": data_dir})
  checkpoint.check_parts(content, loss=loss, data=data or pictures)
  classes = tuple(content["data"]["classes"])
  if pictures is not None:
    if data_dir is not None or split != "test":
      raise ConfigError("pictures= takes the place of split= and data_dir=")
    split, chosen = "pictures", _pictures(run_config, pictures, content["data"])
  else:
    data = data or datasets.load(run_config.data, run_config.seed)
    check_data(data, content["data"])
    chosen = _split(data, split)
  if model is None:
    model = checkpoint.build_model(content)
  layout, hypers = evaluator(run_config, model, loss, content["data"])
  placed = layout.put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], params))
  size = run_config.data.eval_batch_size
  begin = time.perf_counter()
  found = values(layout, placed, hypers, [chosen], size)[0]
  seconds = time.perf_counter() - begin
  result = {
    "schema": SCHEMA,
    "step": number,
    "ema": ema,
    "member": member,
    "split": split,
    **({} if pictures is None else {"pictures": os.path.abspath(pictures)}),
    **report(found, classes),
    "images_per_second": len(chosen) / seconds,
  }
  records.write_json(path(result, folder), result)
  return result


def _split(data, name):
  splits = {"train": data.train, "val": data.val, "test": data.test}
  if splits.get(name) is None:
    have = [n for n, part in splits.items() if part is not None]
    raise ConfigError(f"split={name!r}: this data has {', '.join(have)}")
  return splits[name]


def _pictures(run_config, directory, recorded):
  """Returns a folder of classes, read as the run's own images were."""
  height, width, channels = recorded["shape"]
  read_as = dataclasses.replace(
    run_config.data, dir=str(directory), image_size=config.Pair(height, width)
  )
  return image_folder.load_for_classes(read_as, tuple(recorded["classes"]), channels)


def path(result: dict, workdir):
  """Returns the file of an evaluation: `evaluations/{split}-{step}.json`, with `-ema`
  and the member where there is such; of other pictures, with the name of their folder
  and a hash of its path."""
  folder, _ = checkpoint.find(workdir, result["step"])
  names = [result["split"], str(result["step"])] + ["ema"] * result["ema"]
  if "pictures" in result:
    place = pathlib.Path(result["pictures"])
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    names.insert(1, f"{place.name}-{digest}")
  names += [] if result["member"] is None else [str(result["member"])]
  return folder / "evaluations" / f"{'-'.join(names)}.json"


def evaluator(run_config, model, loss, data: dict):
  """Returns a layout that can evaluate one member, and its traced settings."""
  hyper = steps.hyper(run_config, 0.0, models.traceable(run_config.model))
  inputs = steps.Inputs.recorded(data)
  optimizer = optim.make(
    run_config.optim, optim.Plan(1, 0, 0.0), run_config.model.depth
  )
  made = steps.make(
    run_config, model, loss or losses.make(run_config.loss), optimizer, inputs
  )
  layout = devices.Jit(made, 1, fsdp=False)
  return layout, layout.put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], hyper))


def check_data(dataset, recorded: dict) -> None:
  """Refuses other data than a run was trained on.

  Raises:
    ConfigError: other content, or other classes.
  """
  if list(dataset.classes) != list(recorded["classes"]):
    raise ConfigError(
      f"the run was trained on classes {recorded['classes']}, this data has "
      f"{list(dataset.classes)}"
    )
  if dataset.fingerprint != recorded["fingerprint"]:
    raise ConfigError(
      f"this is not the data set {recorded['name']!r} that the run was trained on: "
      f"fingerprint {dataset.fingerprint[:12]}, expected {recorded['fingerprint'][:12]}"
    )


def _mean(array) -> float:
  return float(np.mean(array, dtype=np.float64)) if len(array) else float("nan")

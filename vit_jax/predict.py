"""Class probabilities of picture files, prepared as the checkpoint's run was."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import checkpoint, losses, steps
from vit_jax.config import ConfigError
from vit_jax.data import images

BATCH = 64


def run(
  workdir,
  files,
  *,
  step="latest",
  ema=False,
  member=None,
  top=5,
  model=None,
  loss=None,
):
  """Returns `(found, failed)`: predictions by file, and reasons by file.

  Args:
    workdir: run folder, or a step in it.
    files: paths of pictures.
    step, ema, member: see `vit_jax.load`.
    top: classes to name for each, from 1; all where there are fewer.
    model, loss: of a run that was trained with its own; the loss has
      `probabilities(logits)`.

  Returns:
    `[{"file": f, "predictions": [{"class": c, "probability": p}, ...]}, ...]` in the
    order of the files, greatest probability first; `{file: why it cannot be read}`.
  """
  if top < 1:
    raise ConfigError(f"top={top}: expected 1 class or more")
  params, content, _ = checkpoint.load_params(
    workdir, step=step, ema=ema, member=member
  )
  checkpoint.check_parts(content, loss=loss)
  objective = loss or losses.make(content["config"].loss)
  if not hasattr(objective, "probabilities"):
    raise ConfigError("this run learns no classes to name; fine-tune it")
  model = model or checkpoint.build_model(content)
  data = content["data"]
  height, width, channels = data["shape"]
  interpolation = content["config"].data.interpolation
  pixels, good, failed = [], [], {}
  for file in files:
    try:
      pixels.append(
        images.read(
          file, size=(height, width), channels=channels, interpolation=interpolation
        )
      )
      good.append(str(file))
    except (images.ImageError, OSError) as error:
      failed[str(file)] = str(error).removeprefix(f"{file}: ")
  inputs = steps.Inputs.recorded(data)

  @jax.jit
  def probabilities(batch):
    logits = model.apply({"params": params}, inputs.normalise(batch))
    return objective.probabilities(logits)

  found = []
  for start in range(0, len(pixels), BATCH):
    batch = np.stack(pixels[start : start + BATCH])
    count = len(batch)
    # One shape for all batches, so that one program serves them.
    if len(pixels) > BATCH:
      batch = np.pad(batch, ((0, BATCH - count), (0, 0), (0, 0), (0, 0)))
    for row in np.asarray(probabilities(jnp.asarray(batch)))[:count]:
      best = np.argsort(-row, kind="stable")[:top]
      found.append(
        {
          "file": good[len(found)],
          "predictions": [
            {"class": data["classes"][i], "probability": float(row[i])} for i in best
          ],
        }
      )
  return found, failed

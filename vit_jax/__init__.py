"""Vision transformers in JAX and Flax.

Letters of array shapes: S members of a population, B batch, N tokens, D width,
H heads, d channels of a head, L layers, K classes, C channels of an image.
"""

from vit_jax.config import Config, ConfigError


def load(run, *, step="latest", ema=False, member=None, model=None):
  """Loads a trained model from its run folder.

  Args:
    run: path of the run folder, or of one step inside its `checkpoints/`.
    step: `"latest"`, `"best"` or a step number.
    ema: whether to take the moving average of the parameters.
    member: index or name of the member; needed where the run is a population.
    model: of a run that was trained with its own.

  Returns:
    `(model, params, config)`. `model.apply({"params": params}, images)` gives logits for
    normalised images; `steps.Inputs.recorded(data).normalise(pixels)` normalises them,
    with `data` from `checkpoint.read_config(run)["data"]`.

  Raises:
    ConfigError: no such run, step or member, or damaged files.
  """
  from vit_jax.checkpoint import load as load_checkpoint

  return load_checkpoint(run, step=step, ema=ema, member=member, model=model)


__all__ = ["Config", "ConfigError", "load"]

"""Models: the only part of the package that imports Flax."""

from vit_jax import config as config_lib
from vit_jax.models.mae import MaskedAutoencoder, visible_patches
from vit_jax.models.patches import Geometry, geometry
from vit_jax.models.vit import ViT, traceable


def build(
  config: config_lib.Config, image: config_lib.Pair, classes: int
) -> ViT | MaskedAutoencoder:
  """Returns the model of a run.

  Args:
    config: the whole configuration; `loss.name="mae"` wraps the ViT in a masked
      autoencoder.
    image: height and width of the images.
    classes: number of classes of the data.

  Raises:
    ConfigError: patches that cannot be laid on the image, or none to hide.
  """
  windows = geometry(config.model, image)
  if config.loss.name != "mae":
    return ViT(config.model, windows, classes)
  visible = visible_patches(windows.tokens, config.loss.mask_ratio)
  return MaskedAutoencoder(config.model, windows, classes, visible)


__all__ = ["Geometry", "MaskedAutoencoder", "ViT", "build", "geometry", "traceable"]

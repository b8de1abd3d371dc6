"""Models: the only part of the package that imports Flax."""

from vit_jax import config as config_lib
from vit_jax.models.patches import Geometry, geometry
from vit_jax.models.vit import ViT, traceable


def build(config: config_lib.Config, image: config_lib.Pair, classes: int) -> ViT:
  """Returns the model of a run.

  Args:
    config: the whole configuration; `loss.name="mae"` wraps the ViT in a masked
      autoencoder.
    image: height and width of the images.
    classes: number of classes of the data.
  """
  return ViT(config.model, geometry(config.model, image), classes)


__all__ = ["Geometry", "ViT", "build", "geometry", "traceable"]

"""Closed forms against published figures, the parameter tree and the compiler."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.config import Pair
from vit_jax.models import cost

CONFIGS = Path(__file__).parent.parent / "configs"
# (height and width, channels, classes) of the data that configs name.
DATA = {
  "digits": (8, 1, 10),
  "digits:half": (8, 1, 10),
  "synthetic": (16, 3, 4),
  "mnist": (28, 1, 10),
  "fashion_mnist": (28, 1, 10),
  "cifar10": (32, 3, 10),
  "cifar100": (32, 3, 100),
}
# Parts of the closed form that lie in blocks, by the name inside a block.
IN_BLOCK = {
  "attention": "attention",
  "mlp": "mlp",
  "norm_attention": "norms",
  "norm_mlp": "norms",
  "scale_attention": "scales",
  "scale_mlp": "scales",
}


def configured(image=32, **settings):
  """Returns a model configuration and its geometry."""
  changes = {f"model.{name}": value for name, value in settings.items()}
  config = config_lib.override(config_lib.Config(), changes)
  image = image if isinstance(image, Pair) else Pair(image, image)
  return config.model, models.geometry(config.model, image)


def counted(model, geometry, channels, classes):
  """Returns the parameters of the real model by part, from the shapes of its tree."""
  vit = models.ViT(model, geometry, classes)
  images = jax.ShapeDtypeStruct((1, *geometry.image, channels), jnp.float32)
  tree = jax.eval_shape(vit.init, jax.random.key(0), images)["params"]
  counts = dict.fromkeys(cost.parameters(model, geometry, channels, classes), 0)
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    top, *below = (key.key for key in path)
    part = IN_BLOCK[below[0]] if top.startswith("block_") else top
    counts[part] += leaf.size
  return counts


SMALL = dict(width=64, depth=6, mlp_ratio=2)


@pytest.mark.parametrize(
  "settings, image, channels, tokens, parameters, mega_macs",
  [
    (dict(), 32, 3, 65, 1_205_898, 83.6),
    (dict(mlp_ratio=2), 32, 3, 65, 811_146, 58.0),
    (dict(stride=2, pad=1), 32, 3, 257, None, 406.2),
    (dict(stride=2), 32, 3, 226, None, 346.4),
    (dict(patch=8, stride=4, pad=2), 32, 3, 65, None, 84.7),
    (dict(patch=6, stride=4, pad=1), 32, 3, 65, None, 84.1),
    (dict(patch=2), 32, 3, 257, None, 405.0),
    (dict(width=288, heads=9), 32, 3, 65, None, 403.7),
    (dict(depth=29), 32, 3, 65, None, 402.4),
    (SMALL, 28, 1, 50, 205_962, 11.8),
    (SMALL | dict(patch=8, stride=4, pad=2), 28, 1, 50, 209_034, 12.0),
    (SMALL | dict(stride=2), 28, 1, 170, None, 55.8),
    (SMALL | dict(stride=2, pad=1), 28, 1, 197, 215_370, None),
    (dict(), 28, 1, 50, 1_199_882, None),
    (dict(stride=2, pad=1), 28, 1, 197, 1_218_698, 292.4),
    (dict(patch=2), 28, 1, 197, None, 292.1),
  ],
)
def test_arms_of_the_overlap_study(
  settings, image, channels, tokens, parameters, mega_macs
):
  model, geometry = configured(image, **settings)
  assert cost.tokens(model, geometry) == tokens
  total = sum(cost.parameters(model, geometry, channels, 10).values())
  if parameters is not None:
    assert total == parameters
  macs = sum(cost.macs(model, geometry, channels, 10).values())
  if mega_macs is not None:
    assert round(macs / 1e6, 1) == mega_macs


def test_wider_patches_at_equal_tokens_add_one_and_a_half_percent():
  base, wide, middle = (
    sum(cost.parameters(*configured(**settings), 3, 10).values())
    for settings in (
      dict(),
      dict(patch=8, stride=4, pad=2),
      dict(patch=6, stride=4, pad=1),
    )
  )
  assert round(100 * (wide / base - 1), 1) == 1.5
  # 20 more pixels x 3 channels x 128: 0.64 %.
  assert round(100 * (middle / base - 1), 1) == 0.6


# Parameters with 1000 classes at 224, as the field counts them (DeiT, ViT).
PUBLISHED = {"Ti": 5_717_416, "S": 22_050_664, "B": 86_567_656, "L": 304_326_632}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size):
  model, geometry = configured(224, patch=16, **config_lib.SIZES[size])
  counts = counted(model, geometry, 3, 1000)
  assert sum(counts.values()) == PUBLISHED[size]
  assert cost.parameters(model, geometry, 3, 1000) == counts
  assert cost.tokens(model, geometry) == 197


def test_the_tutorial_size_is_the_default():
  model, _ = configured(**config_lib.SIZES["tutorial"])
  assert model == config_lib.Model()


def configs():
  return sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.mark.parametrize("name", configs())
def test_every_config_of_the_repository(name):
  spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = config_lib.parse(module.get_config())
  image, channels, classes = DATA.get(config.data.name, (224, 3, 1000))
  size = config.data.image_size or Pair(image, image)
  geometry = models.geometry(config.model, size)
  closed = cost.parameters(config.model, geometry, channels, classes)
  assert closed == counted(config.model, geometry, channels, classes)


TOKENIZERS = (
  dict(patch=4),
  dict(patch=(4, 2), stride=(2, 1), pad="same"),
  dict(tokenizer="conv", patch=4),
  dict(tokenizer="conv", patch=2),
  dict(tokenizer="hmlp", patch=8),
  dict(tokenizer="hmlp", patch=2),
)
REST = (
  dict(positions="learned", pool="cls"),
  dict(positions="learned", pool="mean", registers=3, layer_scale=0.1),
  dict(positions="rope2d", pool="map", qk_norm=True, heads=2),
  dict(positions="none", pool="map", mlp="swiglu", mlp_ratio=8 / 3, layer_scale=1.0),
  dict(positions="sincos2d", pool="cls", registers=1, mlp="swiglu", qk_norm=True),
  dict(positions="sincos1d", pool="mean", mlp="gelu_erf", mlp_ratio=1.3, heads=1),
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("rest", REST)
def test_parameters_of_every_part(tokenizer, rest):
  base = dict(width=16, depth=1, heads=4)
  model, geometry = configured(Pair(16, 8), **(base | tokenizer | rest))
  closed = cost.parameters(model, geometry, 2, 5)
  assert closed == counted(model, geometry, 2, 5)


@pytest.mark.parametrize(
  "settings",
  [
    dict(patch=4),
    dict(patch=4, stride=2, pad=1, registers=4, pool="mean"),
    dict(tokenizer="conv", patch=4, pool="map"),
    dict(tokenizer="hmlp", patch=4, mlp="swiglu", mlp_ratio=3.0),
  ],
)
def test_macs_against_the_compiler(settings):
  """XLA counts every element-wise operation too, so the model is wide enough for them
  to be few. Layers are unrolled: of a loop XLA counts one turn."""
  model, geometry = configured(16, width=128, depth=1, heads=2, **settings)
  vit = models.ViT(model, geometry, 10)
  batch = 4
  images = jax.ShapeDtypeStruct((batch, 16, 16, 3), jnp.float32)
  variables = jax.eval_shape(vit.init, jax.random.key(0), images)
  flops = jax.jit(vit.apply).lower(variables, images).compile().cost_analysis()["flops"]
  closed = sum(cost.macs(model, geometry, 3, 10).values())
  np.testing.assert_allclose(closed, flops / 2 / batch, rtol=0.05)


def test_score_bytes():
  """0.4 MB at 65 tokens; 774 MB (binary) for 128 images at 257."""
  assert cost.score_bytes(*configured()) == 6 * 4 * 65**2 * 4
  dense = cost.score_bytes(*configured(stride=2, pad=1))
  assert round(128 * dense / 2**20) == 774


def test_training_flops():
  model, geometry = configured()
  forward = 2 * sum(cost.macs(model, geometry, 3, 10).values())
  assert cost.training_flops(model, geometry, 3, 10, 7) == 3 * 7 * forward
  again, _ = configured(remat=True)
  parts = cost.macs(model, geometry, 3, 10)
  outside = 2 * (parts["tokenizer"] + parts["head"])
  assert cost.training_flops(again, geometry, 3, 10, 1) == 4 * forward - outside

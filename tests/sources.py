"""What the tests of all image sets share."""

import numpy as np
import pytest

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import datasets


def load(name, seed=0, **settings):
  return datasets.load(config.Data(name=name, **settings), seed)


def refused(name, *words, **settings):
  """Loads, expects a refusal in one line that holds all words; returns the text."""
  with pytest.raises(ConfigError) as caught:
    load(name, **settings)
  text = str(caught.value)
  assert "\n" not in text
  for word in words:
    assert word in text, text
  return text


def noise(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def equal(one, other):
  np.testing.assert_array_equal(one.images, other.images)
  np.testing.assert_array_equal(one.labels, other.labels)

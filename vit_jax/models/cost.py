"""What a model costs, in closed form: parameters, multiply-accumulates, score memory.

With P patch side, N patches, T tokens in all (class token and registers too), D width,
L layers, r `mlp_ratio`, C channels and K classes, the plain model has

    parameters  P^2 C D + D  +  D  +  T D  +  L ((4 + 2r) D^2 + (9 + r) D)  +  2D  +  D K + K
    MACs        N P^2 C D  +  L (T (4 + 2r) D^2 + 2 T^2 D)  +  D K

(counted from the definitions of Dosovitskiy et al. 2021). One MAC is one multiplication
and one addition, two FLOPs. Products of matrices are counted; norms, softmax, GELU,
biases and rotations, some percent of the time, are not.
"""

from vit_jax import config as config_lib
from vit_jax.models import patches


def tokens(model: config_lib.Model, geometry: patches.Geometry) -> int:
  """Returns the tokens that the blocks see: class token, registers and patches."""
  return (model.pool == "cls") + model.registers + geometry.tokens


def parameters(
  model: config_lib.Model, geometry: patches.Geometry, channels: int, classes: int
) -> dict[str, int]:
  """Returns the number of parameters of each part, 0 where the model lacks it.

  Args:
    model: its configuration.
    geometry: where the patches lie.
    channels: of the images.
    classes: number of logits.

  Returns:
    By part. `attention`, `mlp`, `norms` and `scales` (LayerScale) are sums over blocks;
    the other names are those of the parameter tree.
  """
  width, depth, hidden = model.width, model.depth, _hidden(model)
  attention = _linear(width, width) * 4
  if model.qk_norm:
    attention += 2 * (width // model.heads)
  mlp = _linear(width, hidden) * _maps_up(model) + _linear(hidden, width)
  norm = 2 * width
  rows = geometry.tokens + (model.pool == "cls")
  return {
    "tokenizer": _tokenizer_parameters(model, geometry, channels),
    "positions": rows * width if model.positions == "learned" else 0,
    "cls": width if model.pool == "cls" else 0,
    "registers": model.registers * width,
    "attention": depth * attention,
    "mlp": depth * mlp,
    "norms": depth * 2 * norm,
    "scales": depth * 2 * width if model.layer_scale is not None else 0,
    "norm": norm,
    # Probe, four maps, one norm, one MLP.
    "pool": width + _linear(width, width) * 4 + norm + mlp
    if model.pool == "map"
    else 0,
    "head": _linear(width, classes),
  }


def macs(
  model: config_lib.Model, geometry: patches.Geometry, channels: int, classes: int
) -> dict[str, int]:
  """Returns the multiply-accumulates of one image, forward, by part.

  `projections` are the four linear maps of attention, `attention` the two products with
  its weights, which grow with the square of the tokens; both are sums over blocks.
  """
  width, depth, hidden = model.width, model.depth, _hidden(model)
  count = tokens(model, geometry)
  mlp = (_maps_up(model) + 1) * width * hidden
  pool = 0
  if model.pool == "map":
    # Query, output and MLP of the probe; keys and values of the patches; two products.
    of_patches = geometry.tokens * (2 * width**2 + 2 * width)
    pool = 2 * width**2 + mlp + of_patches
  return {
    "tokenizer": _tokenizer_macs(model, geometry, channels),
    "projections": depth * count * 4 * width**2,
    "attention": depth * 2 * count**2 * width,
    "mlp": depth * count * mlp,
    "pool": pool,
    "head": width * classes,
  }


def score_bytes(model: config_lib.Model, geometry: patches.Geometry) -> int:
  """Returns the bytes of the attention weights of one image: L H T^2 numbers of the
  type `model.dtype`.

  That is what `attention="dense"` keeps for the backward pass; with `remat` one layer
  at a time is alive.
  """
  size = 4 if model.dtype == "float32" else 2
  return model.depth * model.heads * tokens(model, geometry) ** 2 * size


def training_flops(
  model: config_lib.Model,
  geometry: patches.Geometry,
  channels: int,
  classes: int,
  examples: int,
) -> int:
  """Returns the FLOPs of training on so many examples (an example of each epoch counts).

  Two per MAC; the backward pass costs twice the forward pass (a product for the input
  and one for the weights), and `remat` runs the blocks forward once more.
  """
  forward = macs(model, geometry, channels, classes)
  blocks = forward["projections"] + forward["attention"] + forward["mlp"]
  passes = 3 * sum(forward.values()) + (blocks if model.remat else 0)
  return 2 * passes * examples


def _hidden(model):
  return round(model.width * model.mlp_ratio)


def _maps_up(model):
  """Linear maps from the width to the hidden channels: SwiGLU has a gate too."""
  return 2 if model.mlp == "swiglu" else 1


def _linear(inputs, outputs):
  return inputs * outputs + outputs


def _stem(model, geometry, channels):
  """Returns (inputs, outputs, positions, has bias) of each linear map of the tokenizer,
  and the channels of each of its norms."""
  (height, columns), width = geometry.image, model.width
  side = geometry.stride.height
  if model.tokenizer == "linear":
    window = geometry.patch.height * geometry.patch.width
    return [(window * channels, width, geometry.tokens, True)], []
  halvings = side.bit_length() - 1
  maps, norms = [], []
  for i in range(halvings):
    places = (height >> (i + 1)) * (columns >> (i + 1))
    if model.tokenizer == "conv":
      outputs = max(8, width >> (halvings - 1 - i))
      maps.append((9 * channels, outputs, places, False))
      norms.append(outputs)
    else:
      last = i == halvings - 1
      outputs = width if last else max(8, width // 4)
      maps.append((4 * channels, outputs, places, True))
      norms += [] if last else [outputs]
    channels = outputs
  if model.tokenizer == "conv":
    maps.append((channels, width, geometry.tokens, True))
  return maps, norms


def _tokenizer_parameters(model, geometry, channels):
  maps, norms = _stem(model, geometry, channels)
  linear = sum(i * o + (o if has_bias else 0) for i, o, _, has_bias in maps)
  return linear + 2 * sum(norms)


def _tokenizer_macs(model, geometry, channels):
  maps, _ = _stem(model, geometry, channels)
  return sum(inputs * outputs * places for inputs, outputs, places, _ in maps)

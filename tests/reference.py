"""The vision transformer in NumPy, float64, from the formulas: what tests compare with.

It shares with the package the names of settings and parameters, and no code.
"""

import cmath
import math

import numpy as np


def logits(params, images, model):
  """Returns logits [B, K] of images [B, h, w, C]; `model` is a `config.Model` with the
  linear tokenizer; `params` its tree."""
  images = np.asarray(images, np.float64)
  return _linear(features(params, images, model), params["head"])


def features(params, images, model):
  """Returns what the head reads, [B, D]."""
  x = encoded(params, images, model)
  first = (model.pool == "cls") + model.registers
  if model.pool == "cls":
    return x[:, 0]
  if model.pool == "mean":
    return x[:, first:].sum(1) / x[:, first:].shape[1]
  return _attention_pool(params["pool"], x[:, first:], model)


def encoded(params, images, model):
  """Returns all tokens after the last norm, [B, T, D]."""
  tokens, cells = patch_tokens(params["tokenizer"], images, model)
  width = model.width
  has_class = model.pool == "cls"
  if model.positions == "learned":
    tokens = tokens + params["positions"][has_class:]
  elif model.positions != "none" and model.positions != "rope2d":
    code = {"sincos1d": _sincos1d, "sincos2d": _sincos2d}[model.positions]
    tokens = tokens + np.array(
      [code(i, y, x, width) for i, (y, x) in enumerate(cells)], np.float64
    )
  parts = [tokens]
  if model.registers:
    parts.insert(0, np.tile(params["registers"], (len(images), 1, 1)))
  if has_class:
    first = params["cls"]
    if model.positions == "learned":
      first = first + params["positions"][:1]
    parts.insert(0, np.tile(first, (len(images), 1, 1)))
  x = np.concatenate(parts, 1)
  # The class token and registers lie nowhere: they are not turned.
  places = [None] * (x.shape[1] - len(cells)) + cells
  for i in range(model.depth):
    x = _block(params[f"block_{i}"], x, places, model)
  return _norm(x, params["norm"])


def patch_tokens(params, images, model):
  """Returns tokens [B, N, D] and the (row, column) of each in the grid."""
  ph, pw = model.patch
  sh, sw = model.stride or model.patch
  if model.pad == "same":
    top, left = (ph - sh) // 2, (pw - sw) // 2
    pads = ((top, ph - sh - top), (left, pw - sw - left))
  else:
    pads = tuple((p, p) for p in model.pad)
  mode = {"zero": "constant", "edge": "edge", "reflect": "reflect"}[model.pad_mode]
  padded = np.pad(images, ((0, 0), *pads, (0, 0)), mode=mode)
  tokens, cells = [], []
  for row, y in enumerate(range(0, padded.shape[1] - ph + 1, sh)):
    for column, x in enumerate(range(0, padded.shape[2] - pw + 1, sw)):
      window = padded[:, y : y + ph, x : x + pw]
      # Sum over rows, columns and channels of the window.
      tokens.append(np.tensordot(window, params["kernel"], 3) + params["bias"])
      cells.append((row, column))
  return np.stack(tokens, 1), cells


def _sincos1d(i, y, x, width):
  """PE(p, 2k) = sin(p / 10000^(2k/D)), PE(p, 2k + 1) = cos(p / 10000^(2k/D))."""
  del y, x
  code = []
  for channel in range(width):
    angle = i / 10_000 ** ((channel - channel % 2) / width)
    code.append(math.cos(angle) if channel % 2 else math.sin(angle))
  return code


def _sincos2d(i, y, x, width):
  del i
  quarter = width // 4
  omega = [10_000 ** (-k / (quarter - 1)) for k in range(quarter)]
  return [f(place * w) for place in (x, y) for f in (math.sin, math.cos) for w in omega]


def _turned(x, places):
  """Rotary positions: channels (k, k + d/2) are one complex number, turned by
  place * 100^(-j / (d/4)); the first half of the pairs by the row, the other by the
  column. x is [B, H, T, d]."""
  half = x.shape[-1] // 2
  out = x[..., :half] + 1j * x[..., half:]
  for t, place in enumerate(places):
    if place is None:
      continue
    for k in range(half):
      axis, j = divmod(k, half // 2)
      out[:, :, t, k] *= cmath.exp(1j * place[axis] * 100 ** (-j / (half // 2)))
  return np.concatenate([out.real, out.imag], -1)


def _block(p, x, places, model):
  y = _attention(p["attention"], _norm(x, p["norm_attention"]), places, model)
  if model.layer_scale is not None:
    y = y * p["scale_attention"]
  x = x + y
  y = _mlp(p["mlp"], _norm(x, p["norm_mlp"]), model)
  if model.layer_scale is not None:
    y = y * p["scale_mlp"]
  return x + y


def _attention(p, x, places, model):
  q, k, v = (_heads(x, p[name]) for name in ("query", "key", "value"))
  if model.qk_norm:
    q, k = _norm(q, p["query_norm"]), _norm(k, p["key_norm"])
  if model.positions == "rope2d":
    q, k = _turned(q, places), _turned(k, places)
  if model.scale == "rsqrt":
    scale = 1 / math.sqrt(q.shape[-1])
  elif model.scale == "none":
    scale = 1
  else:
    scale = model.scale
  return _mix(q, k, v, scale, p["out"])


def _mix(q, k, v, scale, out):
  scores = np.einsum("bhnd,bhmd->bhnm", q, k) * scale
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights = weights / weights.sum(-1, keepdims=True)
  mixed = np.einsum("bhnm,bhmd->bhnd", weights, v)
  return np.einsum("bhnd,hdf->bnf", mixed, out["kernel"]) + out["bias"]


def _attention_pool(p, x, model):
  """One learned query; a residual MLP after it."""
  q = _heads(np.tile(p["probe"], (len(x), 1, 1)), p["query"])
  k, v = _heads(x, p["key"]), _heads(x, p["value"])
  y = _mix(q, k, v, 1 / math.sqrt(q.shape[-1]), p["out"])
  return (y + _mlp(p["mlp"], _norm(y, p["norm"]), model))[:, 0]


def _mlp(p, x, model):
  up = _linear(x, p["up"])
  if model.mlp == "swiglu":
    gate = _linear(x, p["gate"])
    hidden = gate / (1 + np.exp(-gate)) * up
  elif model.mlp == "gelu_erf":
    hidden = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
  else:
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    hidden = up * (1 + np.tanh(inner)) / 2
  return _linear(hidden, p["down"])


def _heads(x, p):
  return np.einsum("bnf,fhd->bhnd", x, p["kernel"]) + p["bias"][:, None]


def _linear(x, p):
  return x @ p["kernel"] + p["bias"]


def _norm(x, p):
  centred = x - x.mean(-1, keepdims=True)
  scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
  return scaled + p["bias"] if "bias" in p else scaled

"""The vision transformer, from pixels to logits, top to bottom as in the figure of
Dosovitskiy et al. 2021: patches -> tokens -> blocks -> pool -> logits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import config as config_lib
from vit_jax.models import attention, ops, patches, positions
from vit_jax.models.noise import Noise, drop_path, dropout

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class ViT(nn.Module):
  """Vision transformer.

  Attributes:
    config: sizes and parts.
    geometry: where the patches lie on the images.
    classes: number of logits.
  """

  config: config_lib.Model
  geometry: patches.Geometry
  classes: int

  def setup(self):
    c, width = self.config, self.config.width
    self.tokenizer = patches.TOKENIZERS[c.tokenizer](
      self.geometry, width, DTYPES[c.dtype]
    )
    if c.pool == "cls":
      self.cls = self.param("cls", nn.initializers.zeros, (1, width))
    if c.registers:
      self.registers = self.param(
        "registers", nn.initializers.normal(0.02), (c.registers, width)
      )
    if c.positions == "learned":
      rows = self.geometry.tokens + (c.pool == "cls")
      self.positions = self.param(
        "positions", nn.initializers.normal(0.02), (rows, width)
      )
    self.block = [Block(c) for _ in range(c.depth)]
    self.norm = LayerNorm()
    if c.pool == "map":
      self.pool = AttentionPool(c)
    self.head = nn.Dense(self.classes, kernel_init=nn.initializers.zeros)

  @property
  def prefix(self) -> int:
    """Number of tokens before the patches: the class token and the registers."""
    return (self.config.pool == "cls") + self.config.registers

  def __call__(
    self, images: Float[Array, "B h w C"], *, keys=None, hyper=None
  ) -> Float[Array, "B K"]:
    """Returns logits, float32.

    Args:
      images: normalised pixels.
      keys: one random key per image, [B], for dropout and drop path; None: neither.
      hyper: `scale`, `dropout` and `drop_path` as traced values; None: the config's.
    """
    return self.head(self.features(images, keys=keys, hyper=hyper))

  def features(self, images, *, keys=None, hyper=None) -> Float[Array, "B D"]:
    """Returns what the head reads, float32."""
    return self.pooled(self.encode(self.embed(images), keys=keys, hyper=hyper))

  def embed(self, images: Float[Array, "B h w C"]) -> Float[Array, "B N D"]:
    """Returns patch tokens with their positions; no class token yet."""
    c, tokens = self.config, self.tokenizer(images)
    if c.positions == "learned":
      table = self.positions[int(c.pool == "cls") :]
    elif c.positions in positions.FIXED:
      table = jnp.asarray(positions.FIXED[c.positions](self.geometry.grid, c.width))
    else:
      return tokens
    return tokens + table.astype(tokens.dtype)[None]

  def encode(
    self, tokens: Float[Array, "B N D"], *, keys=None, hyper=None, places=None
  ) -> Float[Array, "B T D"]:
    """Puts class token and registers first, runs the blocks and the last norm.

    Args:
      tokens: patch tokens, all of the grid or some of them.
      keys, hyper: as in `__call__`.
      places: grid numbers of the tokens, [B, N], where they are not all of the grid.
    """
    hyper = hyper or traceable(self.config)
    noise = None
    if keys is not None:
      noise = Noise(keys, hyper["dropout"], hyper["drop_path"])
    x = jnp.concatenate([*self._prefix_tokens(tokens), tokens], axis=1)
    if noise is not None and self.config.dropout > 0:
      x = dropout(x, noise.of(0))
    x = self._run_blocks(x, hyper["scale"], noise, self._rotation(places))
    return self.norm(x)

  def pooled(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
    """Returns the class token, the mean over patches, or their attention pool."""
    if self.config.pool == "cls":
      return x[:, 0]
    if self.config.pool == "mean":
      return x[:, self.prefix :].mean(axis=1)
    return self.pool(x[:, self.prefix :])

  def _prefix_tokens(self, tokens):
    c, batch = self.config, tokens.shape[0]
    if c.pool == "cls":
      first = self.cls
      if c.positions == "learned":
        first = first + self.positions[:1]
      yield jnp.broadcast_to(first.astype(tokens.dtype), (batch, 1, c.width))
    if c.registers:
      registers = self.registers.astype(tokens.dtype)
      yield jnp.broadcast_to(registers, (batch, c.registers, c.width))

  def _rotation(self, places):
    """Returns rotary angles of all tokens, [1 or B, T, d/2], 0 for the prefix; None
    where positions are not rotary."""
    c = self.config
    if c.positions != "rope2d":
      return None
    angles = jnp.asarray(positions.rope_angles(self.geometry.grid, c.width // c.heads))
    angles = angles[None] if places is None else angles[places]
    return jnp.pad(angles, ((0, 0), (self.prefix, 0), (0, 0)))

  def _run_blocks(self, x, scale, noise, rotation):
    c = self.config
    # Drop path rises linearly from 0 in the first block.
    ramp = np.linspace(0, 1, c.depth, dtype=np.float32)

    def in_layer(i, share):
      return noise and noise.of(i + 1)._replace(drop_path=noise.drop_path * share)

    watched = self.is_mutable_collection("intermediates") or self.is_initializing()
    if watched or not (c.scan_layers or c.remat):
      for i, block in enumerate(self.block):
        x = block(x, scale, in_layer(i, ramp[i]), rotation)
      return x

    block = Block(c, parent=None)

    def body(x, layer):
      params, i, share = layer
      return block.apply({"params": params}, x, scale, in_layer(i, share), rotation), ()

    if c.remat:
      body = jax.checkpoint(body)
    params = [b.variables["params"] for b in self.block]
    layers = list(zip(params, np.arange(c.depth, dtype=np.uint32), ramp))
    if c.scan_layers:
      stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
      return jax.lax.scan(body, x, stacked)[0]
    for layer in layers:
      x, _ = body(x, layer)
    return x


class Block(nn.Module):
  """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

  config: config_lib.Model

  @nn.compact
  def __call__(
    self, x: Float[Array, "B T D"], scale, noise: Noise | None = None, rotation=None
  ) -> Float[Array, "B T D"]:
    c = self.config
    y = LayerNorm(name="norm_attention")(x).astype(x.dtype)
    y = Attention(c, name="attention")(y, scale, rotation)
    x = x + self._branch(y, "scale_attention", noise and noise.of(0))
    y = LayerNorm(name="norm_mlp")(x).astype(x.dtype)
    y = MLP(c, name="mlp")(y, noise and noise.of(1))
    return x + self._branch(y, "scale_mlp", noise and noise.of(2))

  def _branch(self, y, name, noise):
    """Returns a residual branch with its dropout, LayerScale and drop path."""
    c = self.config
    if noise is not None and c.dropout > 0:
      y = dropout(y, noise.of(0))
    if c.layer_scale is not None:
      start = nn.initializers.constant(c.layer_scale)
      y = y * self.param(name, start, (c.width,)).astype(y.dtype)[None, None]
    if noise is not None and c.drop_path > 0:
      y = drop_path(y, noise.of(1))
    return y


class Attention(nn.Module):
  """Multi-head self-attention."""

  config: config_lib.Model

  @nn.compact
  def __call__(
    self, x: Float[Array, "B T D"], scale, rotation=None
  ) -> Float[Array, "B T D"]:
    c = self.config
    q, k, v = (to_heads(c, name)(x) for name in ("query", "key", "value"))
    if c.qk_norm:
      q = LayerNorm(use_bias=False, name="query_norm")(q).astype(x.dtype)
      k = LayerNorm(use_bias=False, name="key_norm")(k).astype(x.dtype)
    if rotation is not None:
      q, k = positions.rotate(q, rotation), positions.rotate(k, rotation)
    if self.is_mutable_collection("intermediates"):
      self.sow("intermediates", "weights", attention.weights(q, k, scale=scale))
    mixed = attention.OPERATORS[c.attention](q, k, v, scale=scale)
    return from_heads(c, "out")(mixed)


class MLP(nn.Module):
  """Two linear maps with GELU between, or SwiGLU (Shazeer 2020) with a gate."""

  config: config_lib.Model

  @nn.compact
  def __call__(
    self, x: Float[Array, "B T D"], noise: Noise | None = None
  ) -> Float[Array, "B T D"]:
    c = self.config
    hidden = round(c.width * c.mlp_ratio)
    down = Linear(c.width, c.dtype, name="down")
    up = Linear(hidden, c.dtype, name="up")(x)
    noisy = noise is not None and c.dropout > 0
    if c.mlp == "gelu" and not noisy:
      return down(up, ops.gelu_matmul)
    if c.mlp == "swiglu":
      x = nn.silu(Linear(hidden, c.dtype, name="gate")(x)) * up
    else:
      x = nn.gelu(up, approximate=c.mlp == "gelu")
    return down(dropout(x, noise) if noisy else x)


class AttentionPool(nn.Module):
  """One learned query over all tokens, then an MLP (MAP head, Zhai et al. 2022)."""

  config: config_lib.Model

  @nn.compact
  def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
    c = self.config
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, c.width))
    probe = jnp.broadcast_to(probe.astype(x.dtype), (x.shape[0], 1, c.width))
    q = to_heads(c, "query")(probe)
    k, v = to_heads(c, "key")(x), to_heads(c, "value")(x)
    scale = (c.width // c.heads) ** -0.5
    if self.is_mutable_collection("intermediates"):
      self.sow("intermediates", "weights", attention.weights(q, k, scale=scale))
    x = from_heads(c, "out")(attention.dense(q, k, v, scale=scale))
    y = LayerNorm(name="norm")(x).astype(x.dtype)
    return (x + MLP(c, name="mlp")(y))[:, 0].astype(jnp.float32)


class Linear(nn.Module):
  """x @ kernel + bias for each token, in the given type."""

  features: int
  dtype: str

  @nn.compact
  def __call__(
    self, x: Float[Array, "B N I"], product=ops.matmul
  ) -> Float[Array, "B N O"]:
    shape = (x.shape[-1], self.features)
    kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape)
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    dtype = DTYPES[self.dtype]
    y = product(x.astype(dtype), kernel.astype(dtype))
    return y + bias.astype(dtype)[None, None]


class ToHeads(nn.Module):
  """A linear map from tokens to the channels of each head."""

  heads: int
  dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H d"]:
    batch, tokens, width = x.shape
    shape = (width, self.heads, width // self.heads)
    kernel = self.param("kernel", flat_xavier(1), shape)
    bias = self.param("bias", nn.initializers.zeros, shape[1:])
    dtype = DTYPES[self.dtype]
    # One flat product: faster on a CPU than letting the product write the heads apart.
    y = ops.matmul(x.astype(dtype), kernel.reshape(width, width).astype(dtype))
    y = y + bias.reshape(1, 1, width).astype(dtype)
    return y.reshape(batch, tokens, *shape[1:])


class FromHeads(nn.Module):
  """A linear map from the channels of all heads to tokens."""

  dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "B T H d"]) -> Float[Array, "B T D"]:
    batch, tokens, heads, channels = x.shape
    width = heads * channels
    kernel = self.param("kernel", flat_xavier(2), (heads, channels, width))
    bias = self.param("bias", nn.initializers.zeros, (width,))
    dtype = DTYPES[self.dtype]
    y = x.reshape(batch, tokens, width).astype(dtype)
    y = ops.matmul(y, kernel.reshape(width, width).astype(dtype))
    return y + bias.astype(dtype)[None, None]


def to_heads(c: config_lib.Model, name: str) -> ToHeads:
  return ToHeads(c.heads, c.dtype, name=name)


def from_heads(c: config_lib.Model, name: str) -> FromHeads:
  return FromHeads(c.dtype, name=name)


def flat_xavier(inputs: int):
  """Xavier-uniform values for a kernel whose first `inputs` axes are summed over."""

  def init(key, shape, dtype=jnp.float32):
    flat = (int(np.prod(shape[:inputs])), int(np.prod(shape[inputs:])))
    return nn.initializers.xavier_uniform()(key, flat, dtype).reshape(shape)

  return init


class LayerNorm(nn.Module):
  """Normalises tokens over their channels, in float32."""

  use_bias: bool = True

  @nn.compact
  def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    width = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, width)
    bias = jnp.zeros(width)
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, width)
    return ops.layer_norm(x, scale, bias)


def traceable(c: config_lib.Model) -> dict:
  """Returns the settings that a call may replace by traced values."""
  scales = {"rsqrt": (c.width // c.heads) ** -0.5, "none": 1.0}
  scale = c.scale if isinstance(c.scale, float) else scales[c.scale]
  return {"scale": scale, "dropout": c.dropout, "drop_path": c.drop_path}

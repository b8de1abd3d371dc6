"""Vision transformers of others, at a size of ours: what people would take instead.

Each function has the arguments (config, classes, steps, train) and returns a `Runner`
whose round makes `steps` training steps (cross-entropy, clipping, AdamW), or as many
evaluations of a batch, on data that lies ready in memory.
"""

from vit_jax.bench import sizes
from vit_jax.bench.race import Missing, Runner

# Settings that every peer is built from, or that change no number.
FOLLOWED = (
  "data.batch_size",
  "data.image_size",
  "model.patch",
  "model.stride",
  "model.pad",
  "model.width",
  "model.depth",
  "model.heads",
  "model.mlp_ratio",
  "model.dtype",
  "model.attention",
  "model.scan_layers",
  "model.remat",
  "optim.accumulate",
)
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.05


def timm(config, classes, steps, train):
  """timm's VisionTransformer, PyTorch as it runs by itself."""
  return _torch(_timm_model(config, classes), config, classes, steps, train)


def timm_compiled(config, classes, steps, train):
  """The same through `torch.compile`."""
  model = _timm_model(config, classes)
  return _torch(model, config, classes, steps, train, compiled=True)


def vit_pytorch(config, classes, steps, train):
  """lucidrains' ViT."""
  import vit_pytorch as package

  m = config.model
  model = package.ViT(
    image_size=config.data.image_size.height,
    patch_size=m.patch.height if _plain(config) else m.stride.height,
    num_classes=classes,
    dim=m.width,
    depth=m.depth,
    heads=m.heads,
    dim_head=m.width // m.heads,
    mlp_dim=round(m.width * m.mlp_ratio),
  )
  if not _plain(config):
    model.to_patch_embedding = _torch_tokenizer(config)
  return _torch(model, config, classes, steps, train)


def equimo(config, classes, steps, train):
  """Equimo's VisionTransformer (Equinox), one program a step."""
  import equinox as eqx
  import jax
  from equimo.models.vit import VisionTransformer

  if not _plain(config) or config.model.dtype != "float32":
    raise Missing("its patches lie side by side, in float32")
  m = config.model
  model = VisionTransformer(
    img_size=config.data.image_size.height,
    in_channels=sizes.CHANNELS,
    dim=m.width,
    patch_size=m.patch.height,
    num_heads=m.heads,
    depths=[m.depth],
    mlp_ratio=m.mlp_ratio,
    reg_tokens=0,
    global_pool="token",
    num_classes=classes,
    key=jax.random.key(0),
  )
  params, rest = eqx.partition(model, eqx.is_inexact_array)

  def apply(params, images, key):
    keys = jax.random.split(key, len(images))
    whole = eqx.combine(params, rest)
    call = jax.vmap(lambda x, k: whole(x, key=k, inference=not train))
    return call(images.transpose(0, 3, 1, 2), keys)

  return _optax(apply, params, config, classes, steps, train)


def plain_flax(config, classes, steps, train):
  """A straightforward Flax ViT with `nn.MultiHeadDotProductAttention`."""
  import jax
  import jax.numpy as jnp

  from vit_jax.bench.plain_flax import PlainViT

  m = config.model
  hidden = round(m.width * m.mlp_ratio)
  model = PlainViT(
    sizes.geometry(config), m.width, m.depth, m.heads, hidden, classes, m.dtype
  )
  images = jnp.zeros((1, *config.data.image_size, sizes.CHANNELS))
  params = jax.jit(model.init)(jax.random.key(0), images)

  def apply(params, images, key):
    del key
    return model.apply(params, images)

  return _optax(apply, params, config, classes, steps, train)


# What they import, that memory is counted besides; the last reads our sizes.
PEERS = {
  "timm": (timm, ("torch", "timm", "vit_jax.models")),
  "timm compiled": (
    timm_compiled,
    ("torch", "timm", "torch._inductor", "vit_jax.models"),
  ),
  "vit-pytorch": (vit_pytorch, ("torch", "vit_pytorch", "vit_jax.models")),
  "equimo": (equimo, ("jax", "optax", "equinox", "equimo")),
  "plain Flax": (plain_flax, ("jax", "optax", "flax.linen")),
}


def check(changes) -> None:
  """Raises `Missing` where settings have changed that peers do not follow."""
  for name in changes:
    if name not in FOLLOWED:
      raise Missing(f"it cannot follow {name}")


def _plain(config):
  """Whether patches are squares side by side, without padding."""
  g = sizes.geometry(config)
  if g.patch.height != g.patch.width or g.stride.height != g.stride.width:
    raise Missing("patches that are not square")
  return not g.overlaps and not any(map(any, g.pads))


def _timm_model(config, classes):
  from timm.models.vision_transformer import VisionTransformer

  m = config.model
  model = VisionTransformer(
    img_size=tuple(config.data.image_size),
    patch_size=tuple(m.patch if _plain(config) else m.stride),
    embed_dim=m.width,
    depth=m.depth,
    num_heads=m.heads,
    mlp_ratio=m.mlp_ratio,
    num_classes=classes,
  )
  if not _plain(config):
    # As many tokens as with patches of that stride; the windows are larger.
    model.patch_embed.proj = _torch_tokenizer(config)[0]
  return model


def _torch_tokenizer(config):
  import torch

  class Transpose(torch.nn.Module):
    def forward(self, x):
      return x.transpose(1, 2)

  g = sizes.geometry(config)
  pads = tuple(before for before, _ in g.pads)
  return torch.nn.Sequential(
    torch.nn.Conv2d(
      sizes.CHANNELS, config.model.width, tuple(g.patch), tuple(g.stride), pads
    ),
    torch.nn.Flatten(2),
    Transpose(),
  )


def _torch(model, config, classes, steps, train, compiled=False):
  """Returns the runner of a PyTorch model."""
  import torch

  where = "cuda" if torch.cuda.is_available() else "cpu"
  batch = config.data.batch_size
  model = model.to(where).train(train)
  size = sum(p.numel() for p in model.parameters())
  images = torch.randn(batch, sizes.CHANNELS, *config.data.image_size, device=where)
  labels = (torch.arange(batch) % classes).to(where)
  half = config.model.dtype != "float32"
  dtype = getattr(torch, config.model.dtype)

  def forward():
    with torch.autocast(where, dtype, enabled=half):
      return call(images)

  call = torch.compile(model) if compiled else model
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
  )

  def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(forward().float(), labels).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

  def evaluate():
    with torch.inference_mode():
      forward().float().softmax(-1).max(-1)

  def go():
    for _ in range(steps):
      step() if train else evaluate()
    if where == "cuda":
      torch.cuda.synchronize()

  return Runner(go, {"parameters": size})


def _optax(apply, params, config, classes, steps, train):
  """Returns the runner of `apply(params, images, key) -> logits`."""
  import jax
  import jax.numpy as jnp
  import optax

  batch = config.data.batch_size
  shape = (batch, *config.data.image_size, sizes.CHANNELS)
  images = jax.random.normal(jax.random.key(1), shape)
  labels = jnp.arange(batch) % classes
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
  )
  size = sum(leaf.size for leaf in jax.tree.leaves(params))

  def step(state, images, labels, key):
    params, moments = state

    def loss(params):
      logits = apply(params, images, key).astype(jnp.float32)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(gradient, moments, params)
    return (optax.apply_updates(params, updates), moments), value

  def evaluate(params, images, key):
    probabilities = jax.nn.softmax(apply(params, images, key).astype(jnp.float32))
    return probabilities.max(-1), probabilities.argmax(-1)

  key = jax.random.key(2)
  step = jax.jit(step, donate_argnums=0)
  evaluate = jax.jit(evaluate)
  state = (params, jax.jit(optimizer.init)(params)) if train else params

  def go():
    nonlocal state
    for _ in range(steps):
      if train:
        state, out = step(state, images, labels, key)
      else:
        out = evaluate(state, images, key)
    jax.block_until_ready((state, out))

  return Runner(go, {"parameters": size})

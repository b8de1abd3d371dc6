"""Attention operators, forward and backward, over the number of tokens."""

import numpy as np

from vit_jax.bench import limits, race, report
from vit_jax.bench.race import Contender, Runner
from vit_jax.models import attention

HEADS, CHANNELS = 4, 32  # of the reference model
TOKENS_OF_A_ROUND = 128 * 65  # so batches shrink as sequences grow
PRODUCT = "limit: matrix product"


def run(tokens, rounds) -> report.Result:
  """Times every operator of ours and the peers' at each number of tokens."""
  rows, raw, rates = [], {}, []
  for count in sorted(set(tokens)):
    batch = max(1, TOKENS_OF_A_ROUND // count)
    starts = {
      f"vit_jax {name}": lambda name=name, size=(batch, count): Contender(
        ours, name, *size, needs=("jax", "vit_jax.models.attention")
      )
      for name in attention.OPERATORS
    }
    for name, (make, needs) in PEERS.items():
      starts[name] = lambda make=make, needs=needs, size=(batch, count): Contender(
        make, *size, needs=needs
      )
    starts[PRODUCT] = limits.product
    field = race.contenders(starts, "vit_jax dense")
    seconds = race.race(field, rounds)
    raw[count] = seconds
    rate = [field[PRODUCT].facts["flops"] / s for s in seconds[PRODUCT]]
    rates += rate
    # Two products forwards and four backwards; two FLOPs a multiply-accumulate.
    flops = 6 * 2 * batch * HEADS * count**2 * CHANNELS
    for name, contender in field.items():
      peak, _ = contender.memory()
      contender.close()
      if name == PRODUCT:
        continue
      rows.append(
        {
          "operator": name,
          "tokens": count,
          "ms an image": race.spread([1e3 * s / batch for s in seconds[name]]),
          "dense takes x times as long": race.spread(
            race.ratios(seconds[name], seconds["vit_jax dense"])
          ),
          "MFU": race.spread(
            [flops / s / r for s, r in zip(seconds[name], rate, strict=True)]
          ),
          "peak MiB an image": None if peak is None else peak / batch,
        }
      )
  return report.Result(
    name="attention",
    title=f"attention, forward and backward, {HEADS} heads of {CHANNELS} channels",
    rows=rows,
    limits={"matrix product, GFLOP/s": race.spread([r / 1e9 for r in rates])},
    notes=slopes(rows) | {"rounds": rounds},
    raw=raw,
    plot=("ms an image", "tokens"),
  )


def slopes(rows) -> dict[str, str]:
  """Returns the slope of time and memory over tokens in a log-log plot, between the two
  largest sizes of each operator (rows are in their order): 2 is quadratic."""
  found = {}
  for name in dict.fromkeys(row["operator"] for row in rows):
    of_name = [row for row in rows if row["operator"] == name]
    if len(of_name) < 2:
      continue
    small, large = of_name[-2:]
    length = np.log(large["tokens"] / small["tokens"])

    def slope(a, b, length=length):
      return f"{np.log(b / a) / length:.2f}"

    time = slope(small["ms an image"][0], large["ms an image"][0])
    found[f"slope of {name}"] = f"{time} in time"
    peaks = [row["peak MiB an image"] for row in (small, large)]
    if all(peaks):
      found[f"slope of {name}"] += f", {slope(*peaks)} in memory"
  return found


def ours(name, batch, tokens):
  """One of `attention.OPERATORS`."""
  from vit_jax import command

  command.prepare_jax()  # as the scripts do
  operator = attention.OPERATORS[name]
  scale = CHANNELS**-0.5
  return _jax(lambda q, k, v: operator(q, k, v, scale=scale), batch, tokens)


def flax(batch, tokens):
  """Flax's `dot_product_attention`, what `nn.MultiHeadDotProductAttention` calls."""
  from flax.linen import dot_product_attention

  return _jax(dot_product_attention, batch, tokens)


def torch_fused(batch, tokens):
  """PyTorch's `scaled_dot_product_attention`, what timm calls."""
  import torch

  return _torch(torch.nn.functional.scaled_dot_product_attention, batch, tokens)


def torch_explicit(batch, tokens):
  """PyTorch, product by product."""

  def attend(q, k, v):
    weights = (q * CHANNELS**-0.5 @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v

  return _torch(attend, batch, tokens)


PEERS = {
  "Flax": (flax, ("jax", "flax.linen")),
  "PyTorch fused": (torch_fused, ("torch",)),
  "PyTorch explicit": (torch_explicit, ("torch",)),
}


def _jax(operator, batch, tokens):
  import jax
  import jax.numpy as jnp

  def loss(q, k, v):
    return jnp.sin(operator(q, k, v)).sum()

  shape = (batch, tokens, HEADS, CHANNELS)
  arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  return Runner(lambda: jax.block_until_ready(gradient(*arrays)), {})


def _torch(operator, batch, tokens):
  import torch

  where = "cuda" if torch.cuda.is_available() else "cpu"
  shape = (batch, HEADS, tokens, CHANNELS)
  arrays = [torch.randn(shape, device=where, requires_grad=True) for _ in range(3)]

  def go():
    torch.autograd.grad(operator(*arrays).sin().sum(), arrays)
    if where == "cuda":
      torch.cuda.synchronize()

  return Runner(go, {})

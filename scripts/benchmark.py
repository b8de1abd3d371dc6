"""Times the training step of the reference model beside timm's, in one run.

    pip install -e '.[bench]'
    python scripts/benchmark.py train --out benchmark.json

Both models have the same size, batch (128), type (float32) and optimizer (AdamW). Each
has a process of its own, so that neither's threads nor memory are in the other's way,
and they take turns, a round each; the ratio of each pair of rounds counts, so that a
machine that slows down slows both. The limit of the machine is the rate of a large
matrix product.
"""

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time

from absl import flags

from vit_jax import command

flags.DEFINE_integer("rounds", 7, "rounds of each contender", lower_bound=1)
flags.DEFINE_integer("steps", 8, "training steps of a round", lower_bound=1)
flags.DEFINE_integer("accumulate", 1, "micro-batches of our step", lower_bound=1)
flags.DEFINE_string("out", None, "write the figures to this JSON file")

BATCH = 128


class Contender:
  """One model in a process of its own.

  Args:
    make: `make(*arguments) -> (function of one round, number of parameters)`.

  Raises:
    ImportError: what it needs is not installed.
  """

  def __init__(self, make, *arguments):
    # Not a fork: JAX has threads.
    context = multiprocessing.get_context("spawn")
    self._pipe, other = context.Pipe()
    context.Process(target=_serve, args=(other, make, arguments), daemon=True).start()
    other.close()
    self.parameters = self._answer()

  def round(self) -> float:
    """Returns the seconds of one round."""
    self._pipe.send("round")
    return self._answer()

  def _answer(self):
    answer = self._pipe.recv()
    if isinstance(answer, Exception):
      raise answer
    return answer


def _serve(pipe, make, arguments):
  try:
    go, parameters = make(*arguments)
    pipe.send(parameters)
    while pipe.recv():
      pipe.send(_seconds(go))
  except EOFError:  # the benchmark is over
    pass
  except Exception as error:
    pipe.send(error)


def ours(steps, accumulate):
  """Returns a function that makes `steps` training steps of our reference model."""
  import jax
  import numpy as np

  from vit_jax import config, devices, feed, train

  cfg = config.override(
    config.Config(),
    {
      "data.name": "synthetic",
      "data.image_size": 32,
      "data.batch_size": BATCH,
      "train.length": "100000 steps",
      "train.steps_per_call": steps,
      "optim.accumulate": accumulate,
    },
  )
  job = train.prepare(cfg)
  layout = devices.make(cfg, job.steps, 1)
  hypers = layout.put(job.hypers)
  state = layout.init(job.hypers)
  size = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
  source = feed.make(job, layout, 0)

  def go():
    nonlocal state
    batch = source.next(0, steps)
    state, _ = layout.train(state, batch, hypers, *source.data, np.int32(steps))
    jax.block_until_ready(state)

  return go, size


def timm_eager(steps):
  """Returns the same for timm's VisionTransformer in PyTorch."""
  import timm
  import torch

  model = timm.models.vision_transformer.VisionTransformer(
    img_size=32,
    patch_size=4,
    embed_dim=128,
    depth=6,
    num_heads=4,
    num_classes=10,
  )
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
  images, labels = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10

  def go():
    for _ in range(steps):
      optimizer.zero_grad()
      torch.nn.functional.cross_entropy(model(images), labels).backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()

  return go, sum(p.numel() for p in model.parameters())


def matrix_rate():
  """Returns the rate of a 2048^3 float32 product, in GFLOP/s."""
  import jax
  import jax.numpy as jnp

  a = jnp.ones((2048, 2048))
  product = jax.jit(lambda a: a @ a)
  product(a).block_until_ready()
  best = min(_seconds(lambda: product(a).block_until_ready()) for _ in range(5))
  return 2 * 2048**3 / best / 1e9


def _seconds(function):
  begin = time.perf_counter()
  function()
  return time.perf_counter() - begin


def main(arguments):
  if arguments != ["train"]:
    raise command.ConfigError(f"what to time: {arguments}; expected train")
  f = flags.FLAGS
  contenders = {"vit_jax": Contender(ours, f.steps, f.accumulate)}
  try:
    contenders["timm"] = Contender(timm_eager, f.steps)
  except ImportError as error:
    print(f"timm is left out: {error}; pip install -e '.[bench]'", file=sys.stderr)
  sizes = {name: contender.parameters for name, contender in contenders.items()}
  for contender in contenders.values():
    contender.round()  # compiles
    contender.round()  # the first round after it has no memory yet
  seconds = {name: [] for name in contenders}
  for _ in range(f.rounds):
    for name, contender in contenders.items():
      seconds[name].append(contender.round() / f.steps)
  result = {
    "schema": 1,
    "what": "train",
    "batch": BATCH,
    "steps_per_round": f.steps,
    "accumulate": f.accumulate,
    "machine": platform.processor() or platform.machine(),
    "cores": os.cpu_count(),
    "matrix_gflop_per_second": matrix_rate(),
    "parameters": sizes,
    "seconds_per_step": seconds,
  }
  print("| contender | parameters | images/s, median | least | most |")
  print("|---|---|---|---|---|")
  for name, values in seconds.items():
    rates = sorted(BATCH / s for s in values)
    middle = statistics.median(rates)
    print(
      f"| {name} | {sizes[name]:,} | {middle:.0f} | {rates[0]:.0f} | {rates[-1]:.0f} |"
    )
  if "timm" in seconds:
    ratios = sorted(t / o for t, o in zip(seconds["timm"], seconds["vit_jax"]))
    result["ratio_to_timm"] = ratios
    print(
      f"vit_jax / timm, pair by pair: median {statistics.median(ratios):.2f}, "
      f"from {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
  if f.out:
    with open(f.out, "w") as file:
      json.dump(result, file, indent=2)


if __name__ == "__main__":
  command.main(main, __doc__)

"""Training and evaluation steps of our model beside those of others."""

import numpy as np

from vit_jax.bench import limits, peers, race, report, sizes
from vit_jax.bench.race import Contender, Runner
from vit_jax.config import ConfigError, nearest, override
from vit_jax.data import arrays
from vit_jax.data.split import Split
from vit_jax.models import cost

OURS = "vit_jax"
PRODUCT, COPY = "limit: matrix product", "limit: copy"


def run(what, *, size, rounds, steps, changes, only=None) -> report.Result:
  """Times training or evaluation of one size.

  Args:
    what: "train" or "eval".
    size: one of `sizes.SIZES`.
    rounds: turns of the race.
    steps: steps, or batches, of a round.
    changes: settings on top of those of the size.
    only: names of the peers; None: all.

  Returns:
    One row a contender; MFU is model FLOP utilisation: the FLOPs of our formulas a
    second, as a share of the rate of a large matrix product in the same turn.

  Raises:
    ConfigError: no such size, setting or peer.
  """
  unknown = set(only or ()) - set(peers.PEERS)
  if unknown:
    hint = nearest(min(unknown), peers.PEERS)
    raise ConfigError(f"--peers: unknown {min(unknown)!r}{hint}")
  train = what == "train"
  config, classes = sizes.make(size, changes)
  sizes.geometry(config)  # refuses what cannot be, before anything starts
  arguments = (config, classes, steps, train)
  starts = {OURS: lambda: Contender(ours, *arguments, needs=("jax", "vit_jax.train"))}
  for name, (make, needs) in peers.PEERS.items():
    if only is None or name in only:
      starts[name] = lambda make=make, needs=needs: _peer(
        make, changes, arguments, needs
      )
  starts[PRODUCT] = lambda: limits.product(config.model.dtype)
  starts[COPY] = limits.copy
  field = race.contenders(starts, OURS)
  seconds = race.race(field, rounds)
  memory = {
    name: c.memory() for name, c in field.items() if name not in (PRODUCT, COPY)
  }
  facts = {name: dict(contender.facts) for name, contender in field.items()}
  for contender in field.values():
    contender.close()

  images = config.data.batch_size * steps
  rate = [facts[PRODUCT]["flops"] / s for s in seconds[PRODUCT]]
  bandwidth = [facts[COPY]["bytes"] / s for s in seconds[COPY]]
  flops = images * _flops_per_image(config, classes, train)
  rows = []
  for name, (peak, held) in memory.items():
    speed = [images / s for s in seconds[name]]
    share = [flops / s / r for s, r in zip(seconds[name], rate, strict=True)]
    ratio = race.ratios(seconds[OURS], seconds[name])
    rows.append(
      {
        "contender": name,
        "parameters": facts[name]["parameters"],
        "images/s": race.spread(speed),
        "we are x times as fast": None if name == OURS else race.spread(ratio),
        "MFU": race.spread(share),
        "MiB of a step": peak,
        "MiB held": held,
      }
    )
  return report.Result(
    name=f"{what}-{size}",
    title=f"{what} of {size}: batch {config.data.batch_size}, {config.model.dtype}",
    rows=rows,
    limits={
      "matrix product, GFLOP/s": race.spread([r / 1e9 for r in rate]),
      "copy, GB/s read and written": race.spread([b / 1e9 for b in bandwidth]),
      "ms of a step at the product rate": race.spread(
        [1e3 * flops / steps / r for r in rate]
      ),
    },
    notes={
      "tokens": cost.tokens(config.model, sizes.geometry(config)),
      "GFLOP of a step, our formulas": flops / steps / 1e9,
      "the compiler's count / ours": _quotient(facts[OURS]["counted"], flops / steps),
      "settings": dict(changes),
      "rounds": rounds,
      "steps of a round": steps,
    },
    raw={"seconds of each round": seconds},
  )


def _quotient(counted, flops):
  return None if counted is None else counted / flops


def _peer(make, changes, arguments, needs):
  peers.check(changes)
  return Contender(make, *arguments, needs=needs)


def ours(config, classes, steps, train):
  """Our own program, whole: in training batches gathered from the resident data,
  metrics and optimizer; in evaluation the values of each example."""
  import jax
  import numpy as np

  from vit_jax import command, devices, feed
  from vit_jax import train as training

  command.prepare_jax()  # as the scripts do
  config = override(config, {"train.steps_per_call": steps})
  job = training.prepare(config, data=_data(config, classes))
  layout = devices.make(config, job.steps, 1)
  hypers = layout.put(job.hypers)
  state = layout.init(job.hypers)
  size = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
  batch = _batch(job.data.train, config.data.batch_size)
  facts = {"parameters": size, "counted": _counted(job, batch, train)}
  if train:
    source, made = feed.make(job, layout, 0), 0

    def go():
      nonlocal state, made
      chosen, span = source.next(0, steps), np.array([made, made + steps], np.int32)
      state, _ = layout.train(state, chosen, hypers, *source.data, span)
      made += steps
      if state["step"][0] != made:
        raise ValueError("a step was not finite")

  else:
    params, placed = state["params"], layout.put(batch, 0)
    del state  # moments are not needed

    def go():
      for _ in range(steps):
        values = layout.evaluate(params, hypers, {}, placed)
      jax.block_until_ready(values)

  return Runner(go, facts)


def _counted(job, batch, train):
  """Returns the FLOPs of one step as the compiler counts them: that of one member, not
  the program that loops over steps, whose body it would count once. None where the step
  itself has loops."""
  import jax

  model = job.config.model
  chunked = model.attention == "chunked"
  if job.config.optim.accumulate > 1 or model.scan_layers or chunked:
    return None
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = jax.eval_shape(job.steps.init, hyper)
  if train:
    batch = batch | {"weight": np.ones(len(batch["row"]), np.float32)}
    program = jax.jit(job.steps.train_step).lower(state, batch, hyper)
  else:
    program = jax.jit(job.steps.eval_step).lower(state["params"], batch, hyper)
  return program.cost_analysis()["flops"]


def _flops_per_image(config, classes, train):
  """Two a multiply-accumulate; the backward pass has twice those of the forward pass."""
  parts = cost.macs(config.model, sizes.geometry(config), sizes.CHANNELS, classes)
  return 2 * sum(parts.values()) * (3 if train else 1)


def _data(config, classes):
  """Returns random pixels, enough for a batch."""
  random = np.random.default_rng(0)
  count = max(256, config.data.batch_size)
  images = random.integers(
    0, 256, (count, *config.data.image_size, sizes.CHANNELS), np.uint8
  )
  part = Split(images, (np.arange(count) % classes).astype(np.int32))
  names = tuple(map(str, range(classes)))
  return arrays.in_memory("random", part, part, names, ((0.5,) * 3, (0.5,) * 3))


def _batch(split, size):
  return {
    "image": split.images[:size],
    "label": split.labels[:size],
    "row": np.arange(size, dtype=np.int32),
  }

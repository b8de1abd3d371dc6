"""A run small enough for tests: 8x8 images, width 16, two blocks."""

from vit_jax import checkpoint, config, feed, records, train
from vit_jax.loop import Loop


def make(**changes) -> config.Config:
  """Returns the tiny configuration with dotted settings changed (`__` for a dot)."""
  base = config.parse(
    {
      "data": {
        "name": "synthetic",
        "image_size": 8,
        "batch_size": 8,
        "eval_batch_size": 32,
      },
      "model": {"patch": 4, "width": 16, "depth": 2, "heads": 2, "mlp_ratio": 2},
      "optim": {"lr": 1e-2, "warmup": "2 steps"},
      "train": {
        "length": "10 steps",
        "log_every": "5 steps",
        "eval_every": "0 steps",
        "checkpoint_every": "5 steps",
        "steps_per_call": 5,
      },
    }
  )
  return config.override(base, {k.replace("__", "."): v for k, v in changes.items()})


class Silent:
  """A status that is written nowhere."""

  def write(self, *_):
    pass

  def end_member(self, *_):
    pass


def steps(cfg, folder, calls=1, members=({},)):
  """Makes `calls` calls of the compiled program; returns (loop, state, metrics)."""
  import jax
  import numpy as np

  loop = Loop(train.prepare(cfg, members=members), folder, Silent())
  state = loop.layout.init(loop.job.hypers)
  source = feed.make(loop.job, loop.layout, 0)
  count = cfg.train.steps_per_call
  metrics = []
  for call in range(calls):
    batch = source.next(call * count, count)
    span = np.array([call * count, (call + 1) * count], np.int32)
    state, history = loop.layout.train(state, batch, loop.hypers, *source.data, span)
    metrics.append(jax.device_get(history))
  return loop, jax.device_get(loop.layout.single(state)), metrics


def assert_same_runs(one, other, step):
  """Two run folders hold the same rows, and the same bits in the state of a step."""
  import numpy as np

  assert records.equal(records.read(one), records.read(other)) == []
  a, b = (checkpoint.read_arrays(p / "checkpoints" / str(step)) for p in (one, other))
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)

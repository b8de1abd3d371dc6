"""How the steps of `population.py` lie on devices: jit over a mesh, or pmap.

Both are wrappers of the same functions. State, hyper-parameters and resident data are
whole on every device (with `fsdp`, state is cut over them); batches are cut along B.
"""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import config as config_lib
from vit_jax import population
from vit_jax.config import ConfigError

AXIS = "data"
# A leaf smaller than this is not worth cutting over devices.
FSDP_LEAST = 2**10


def make(config: config_lib.Config, steps, members: int):
  """Returns the wrapper that `train.parallel` names.

  Args:
    config: reads `train` and how the batch is to be cut.
    steps: of `steps.make`.
    members: of the population.

  Raises:
    ConfigError: the batch cannot be cut over the devices.
  """
  train, batch_size = config.train, config.data.batch_size
  count = jax.device_count()
  if batch_size % count:
    near = [n for n in (batch_size // count * count, -(-batch_size // count) * count)]
    raise ConfigError(
      f"data.batch_size={batch_size} cannot be cut over {count} devices; try "
      f"{' or '.join(str(n) for n in near if n)}"
    )
  at_once = train.members_at_once or (1 if jax.default_backend() == "cpu" else members)
  if members % min(at_once, members):
    raise ConfigError(
      f"train.members_at_once={at_once} does not divide the {members} members"
    )
  if train.parallel == "jit":
    return Jit(steps, at_once, train.fsdp)
  # There, each device cuts and mixes what it has by itself.
  mixing = config.augment.mixup or config.augment.cutmix
  unit = config.optim.accumulate * (2 if mixing else 1)
  if batch_size // count % unit:
    raise ConfigError(
      f'train.parallel="pmap": data.batch_size={batch_size} over {count} devices with '
      f"optim.accumulate={config.optim.accumulate}{' and mixing' if mixing else ''} "
      f'must be a multiple of {count * unit}; or try train.parallel="jit"'
    )
  return Pmap(steps, at_once)


def initialize(address: str | None, processes: int | None, process: int | None):
  """Joins the processes of a run; without an address, as the cluster says."""
  if address:
    jax.distributed.initialize(address, processes, process)
  elif processes:
    jax.distributed.initialize()


def own_rows(size: int) -> slice:
  """Returns the rows of a global batch that this process holds."""
  part = size // jax.process_count()
  return slice(jax.process_index() * part, (jax.process_index() + 1) * part)


class Jit:
  """One program over a mesh of all devices; the compiler places the collectives."""

  def __init__(self, steps, at_once: int, fsdp: bool):
    self.mesh = jax.make_mesh(
      (jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,)
    )
    self.fsdp = fsdp
    self.whole = NamedSharding(self.mesh, P())
    self._steps = steps
    train = population.train_many(steps.train_step, at_once, lambda tree: tree)
    self._train = jax.jit(train, donate_argnums=0)
    evaluate = population.evaluate_many(steps.eval_step, at_once)
    self._evaluate = jax.jit(evaluate, out_shardings=self.whole)

  def abstract(self, hypers):
    """Returns the shapes and shardings of the state, without making it. Here and in
    `init`, `hypers` are those of the job, not yet placed."""
    shapes = jax.eval_shape(jax.vmap(self._steps.init), hypers)
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=self._sharding(leaf.shape)
      ),
      shapes,
    )

  def init(self, hypers):
    """Returns the first state of every member."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(hypers))
    return _init_program(self._steps, out_shardings=shardings)(hypers)

  def place(self, state):
    """Takes a state whose leaves already lie as `abstract` says."""
    return state

  def single(self, state):
    """Returns the state with one copy of each leaf, [S ...]."""
    return state

  def put(self, tree, axis: int | None = None):
    """Places host arrays, the same on every process: whole, or cut along an axis."""
    sharding = self._cut(axis)
    return jax.tree.map(
      lambda leaf: jax.make_array_from_callback(
        np.shape(leaf), sharding, functools.partial(np.asarray(leaf).__getitem__)
      ),
      tree,
    )

  def put_own(self, tree, axis: int):
    """Places host arrays of which each process holds its own rows along an axis."""
    sharding = self._cut(axis)
    return jax.tree.map(
      lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), tree
    )

  def train(self, state, batches, hypers, own, data, span):
    return self._train(state, batches, hypers, own, data, span)

  def evaluate(self, params, hypers, own, batch):
    return self._evaluate(params, hypers, own, batch)

  def lower(self, batches, hypers, own, data, span):
    """Returns the training program, lowered from shapes alone.

    Args:
      As of `train`; anything with `shape` and `dtype` serves, batches whole: [S, K, B].
    """
    batches = _shapes(batches, self._cut(2))
    others = _shapes((hypers, own, data, span), self.whole)
    return self._train.lower(self.abstract(hypers), batches, *others)

  def _cut(self, axis):
    if axis is None:
      return self.whole
    return NamedSharding(self.mesh, P(*[None] * axis, AXIS))

  def _sharding(self, shape):
    """With `fsdp`, cuts the longest axis (members aside) that the devices divide."""
    devices = self.mesh.size
    axes = [i for i in range(1, len(shape)) if shape[i] % devices == 0]
    if not self.fsdp or not axes or np.prod(shape[1:]) < FSDP_LEAST:
      return self.whole
    return self._cut(max(axes, key=lambda i: shape[i]))


class Pmap:
  """One program per device, the state copied to each; gradients are summed by name."""

  def __init__(self, steps, at_once: int):
    if jax.process_count() > 1:
      raise ConfigError(
        'train.parallel="pmap" is for one process; try train.parallel="jit"'
      )
    self.devices = jax.local_devices()
    self.mesh = jax.make_mesh(
      (len(self.devices),), (AXIS,), axis_types=(AxisType.Auto,)
    )
    self._steps = steps
    reduce = functools.partial(jax.lax.psum, axis_name=AXIS)
    train = population.train_many(steps.train_step, at_once, reduce)
    self._train = jax.pmap(train, AXIS, in_axes=(0, 0, 0, 0, 0, None), donate_argnums=0)
    evaluate = population.evaluate_many(steps.eval_step, at_once)
    self._evaluate = jax.pmap(evaluate, AXIS)

  def abstract(self, hypers):
    return jax.eval_shape(jax.vmap(self._steps.init), hypers)

  def init(self, hypers):
    return self.place(_init_program(self._steps)(hypers))

  def place(self, state):
    copies = len(self.devices)
    sharding = NamedSharding(self.mesh, P(AXIS))
    return jax.tree.map(
      lambda leaf: jax.device_put(
        np.broadcast_to(np.asarray(leaf), (copies, *np.shape(leaf))), sharding
      ),
      state,
    )

  def single(self, state):
    return jax.tree.map(lambda leaf: leaf[0], state)

  def put(self, tree, axis: int | None = None):
    """A copy for each device, or the axis B split: [devices, ..., B / devices]."""
    if axis is None:
      return self.place(tree)

    def cut(leaf):
      leaf = np.asarray(leaf)
      parts = len(self.devices)
      shape = (*leaf.shape[:axis], parts, -1, *leaf.shape[axis + 1 :])
      return np.moveaxis(leaf.reshape(shape), axis, 0)

    return jax.tree.map(cut, tree)

  put_own = put

  def train(self, state, batches, hypers, own, data, span):
    state, metrics = self._train(state, batches, hypers, own, data, span)
    return state, jax.tree.map(lambda leaf: leaf[0], metrics)

  def lower(self, batches, hypers, own, data, span):
    copies = len(self.devices)

    def copied(leaf):
      return jax.ShapeDtypeStruct((copies, *leaf.shape), leaf.dtype)

    def cut(leaf):
      first, second, size, *rest = leaf.shape
      shape = (copies, first, second, size // copies, *rest)
      return jax.ShapeDtypeStruct(shape, leaf.dtype)

    state, *others = jax.tree.map(copied, (self.abstract(hypers), hypers, own, data))
    return self._train.lower(state, jax.tree.map(cut, batches), *others, span)

  def evaluate(self, params, hypers, own, batch):
    values = self._evaluate(params, hypers, own, batch)
    # [devices, S, B / devices] -> [S, B]
    return jax.tree.map(
      lambda leaf: np.moveaxis(np.asarray(leaf), 0, 1).reshape(leaf.shape[1], -1),
      values,
    )


def _init_program(steps, **kwargs):
  """Returns the program that makes the first states, one member after another. It runs
  once, in less time than a CPU takes to compile it: there, it is not optimized."""
  options = {"xla_backend_optimization_level": 0}
  if jax.default_backend() != "cpu":
    options = None

  def one_by_one(hypers):
    return jax.lax.map(steps.init, hypers)

  return jax.jit(one_by_one, compiler_options=options, **kwargs)


def _shapes(tree, sharding=None):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
  )

"""The optimizer: learning rate, clipping, update rule, decay, factors, frozen parts.

One update of one member, in this order:

1. `gradient_norm` is the global norm of the gradient as given (already averaged over
   micro-batches and devices), over the parameters that are not frozen.
2. The gradient is clipped, once: times min(1, clip_norm / gradient_norm).
3. The rule turns it into a direction (`RULES`).
4. Weight decay is added to the direction of every leaf named `kernel`, whatever the
   rule: direction + weight_decay * parameter (decoupled, Loshchilov & Hutter 2019).
   "lamb" then multiplies each leaf by its trust ratio, so that there the decay is
   inside the ratio, as in the paper (You et al. 2020).
5. The parameter changes by -learning_rate * factor * direction. The factor is that of
   `multipliers` times that of `layer_decay`; it acts on the decay too, as the learning
   rate of a parameter group does elsewhere.

What is an optax transformation here takes constants only (momenta, epsilon). Learning
rate, warm-up length, decay and clipping norm may be traced, so that members of a
population share one program; the state has the same structure whatever they are.
"""

import collections
import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax import config as config_lib
from vit_jax.config import ConfigError

# Before the first block: layer 0 of `layer_decay`.
_BELOW_BLOCKS = ("tokenizer", "positions", "cls", "registers")

# Axes that a kernel of a block sums over, and those it writes to; as a matrix it is
# [product of the former, product of the latter]. "muon" needs to know.
_MATRICES = {
  "query": contrib.MuonDimensionNumbers((0,), (1, 2)),  # [D, H, d]
  "key": contrib.MuonDimensionNumbers((0,), (1, 2)),
  "value": contrib.MuonDimensionNumbers((0,), (1, 2)),
  "out": contrib.MuonDimensionNumbers((0, 1), (2,)),  # [H, d, D]
  "up": contrib.MuonDimensionNumbers((0,), (1,)),  # [in, out]
  "gate": contrib.MuonDimensionNumbers((0,), (1,)),
  "down": contrib.MuonDimensionNumbers((0,), (1,)),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Lengths of a run in optimizer updates.

  Attributes:
    total: updates of the whole run, warm-up and cool-down among them.
    cooldown: updates of the linear fall at the end; 0: none.
    warmup: updates of the linear rise at the start; 0: none. A member of a population
      may have another one (`hyper["optim"]["warmup"]`), checked by a plan of its own.
  """

  total: int
  cooldown: int
  warmup: float


class Row(NamedTuple):
  """What the optimizer does with one parameter."""

  name: str
  shape: tuple[int, ...]
  decayed: bool
  factor: float  # on the learning rate
  frozen: bool


def check_plan(plan: Plan) -> None:
  """Raises `ConfigError` where the parts of a run do not fit into it."""
  total, cooldown, warmup = plan.total, plan.cooldown, plan.warmup
  if total < 1:
    raise ConfigError(f"train.length is {total} steps; expected 1 or more")
  if not 0 <= warmup < total:
    raise ConfigError(
      f"optim.warmup is {warmup:g} steps of a run of {total}; expected from 0 to below "
      "the whole run; try a shorter warm-up or a longer train.length"
    )
  if not 0 <= cooldown <= total - warmup:
    raise ConfigError(
      f"optim.warmup ({warmup:g} steps) and optim.cooldown ({cooldown}) do not fit "
      f"into a run of {total} steps; try shorter ones or a longer train.length"
    )


def learning_rate(config: config_lib.Optim, plan: Plan, hyper, step) -> jax.Array:
  """Returns the learning rate of update number `step`, which counts from 0.

  With peak p, warm-up w, total T, cool-down c, and t = min(step, T):

    t < w        p t / w: the first update has rate 0 (it only fills the moments), the
                 update number w is the first with the full rate. w = 0: p at once.
    t >= w       cosine    p (1 + cos(pi (t - w) / (T - w))) / 2
                 linear    p (T - t) / (T - w)
                 rsqrt     p sqrt(max(w, 1) / max(t, 1))
                 constant  p
    all t        times min(1, (T - t) / c) where c > 0

  The value at T (0 for cosine, linear and any cool-down) holds after the end too; the
  last update of a run is number T - 1.

  Args:
    config: says the shape.
    plan: says `total` and `cooldown`; both static.
    hyper: `hyper["optim"]["lr"]` is the peak, `hyper["optim"]["warmup"]` the length of
      the warm-up in updates, below `plan.total`; both may be traced.
    step: number of updates already made; may be traced.
  """
  peak, warmup = hyper["optim"]["lr"], hyper["optim"]["warmup"]
  t = jnp.minimum(jnp.asarray(step, jnp.float32), plan.total)
  # The inner maximum keeps the branch that is not taken finite.
  rise = jnp.where(t < warmup, t / jnp.maximum(warmup, 1e-6), 1.0)
  done = jnp.clip((t - warmup) / (plan.total - warmup), 0.0, 1.0)
  shapes = {
    "cosine": lambda: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "linear": lambda: 1.0 - done,
    "rsqrt": lambda: jnp.sqrt(
      jnp.maximum(warmup, 1.0) / jnp.maximum(t, jnp.maximum(warmup, 1.0))
    ),
    "constant": lambda: 1.0,
  }
  rate = peak * rise * shapes[config.schedule]()
  if plan.cooldown:
    rate *= jnp.minimum(1.0, (plan.total - t) / plan.cooldown)
  return rate


def paths(tree) -> Any:
  """Returns a tree like `tree` whose leaves are their '/'-joined names."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
  )


def decayed(params) -> dict[str, bool]:
  """Returns, by the name of each parameter, whether weight decay acts on it."""
  return {name: _is_decayed(name) for name in jax.tree.leaves(paths(params))}


def table(config: config_lib.Optim, params, depth: int) -> list[Row]:
  """Returns one row for each parameter, in the order of the tree.

  Args:
    config: of the optimizer.
    params: the parameters, or their shapes (`jax.eval_shape`).
    depth: blocks of the model.

  Raises:
    ConfigError: as `Optimizer.init`.
  """
  names = paths(params)
  _check_patterns(config, jax.tree.leaves(names))
  return [
    Row(
      name=name,
      shape=tuple(leaf.shape),
      decayed=_is_decayed(name) and not _is_frozen(config, name),
      factor=_factor(config, depth, name),
      frozen=_is_frozen(config, name),
    )
    for name, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(params))
  ]


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An update rule with its settings. Holds no arrays; made by `make`."""

  config: config_lib.Optim
  plan: Plan
  depth: int

  def init(self, params):
    """Returns the start state: a pytree of the rule's moments.

    Moments have the names of `params`, with None in the place of frozen parameters;
    "muon" keeps those of its matrices stacked over blocks, by kind.

    Raises:
      ConfigError: `optim.freeze` or a pattern of `optim.multipliers` does not select
        what it should.
    """
    names = paths(params)
    _check_patterns(self.config, jax.tree.leaves(names))
    return RULES[self.config.name](self.config).init(self._trained(names, params))

  def update(self, grads, opt_state, params, step, hyper):
    """Returns what to add to the parameters, the next state, and two numbers to log.

    Args:
      grads: averaged gradient, a tree like `params`.
      opt_state: of `init`, or of the previous call.
      params: the parameters.
      step: number of updates already made.
      hyper: `hyper["optim"]` holds `lr`, `warmup` (updates), `weight_decay` and
        `clip_norm` (0 or infinity: no limit); all may be traced.

    Returns:
      updates: a tree like `params`, exactly 0 where frozen.
      opt_state: the next state.
      info: `learning_rate`, the rate of this very update before the factors, and
        `gradient_norm`, before clipping.
    """
    names = paths(params)
    grads, trained = self._trained(names, grads), self._trained(names, params)
    weight_decay, limit = (hyper["optim"][k] for k in ("weight_decay", "clip_norm"))

    norm = optax.tree.norm(grads)
    # Exactly 1 below the limit, so that a limit never reached changes no bit.
    too_long = (limit > 0) & (norm > limit)
    shrink = jnp.where(too_long, limit / jnp.where(too_long, norm, 1.0), 1.0)
    grads = jax.tree.map(lambda g: g * shrink, grads)

    rule = RULES[self.config.name](self.config)
    direction, opt_state = rule.update(grads, opt_state, trained)
    direction = jax.tree.map(
      lambda u, p, name: u + weight_decay * p if _is_decayed(name) else u,
      direction,
      trained,
      self._trained(names, names),
    )
    if self.config.name == "lamb":
      ratio = optax.scale_by_trust_ratio()
      direction, _ = ratio.update(direction, ratio.init(trained), trained)

    rate = learning_rate(self.config, self.plan, hyper, step)
    updates = jax.tree.map(
      lambda name, u, p: (
        jnp.zeros_like(p)
        if u is None
        else -rate * _factor(self.config, self.depth, name) * u
      ),
      names,
      direction,
      params,
    )
    return updates, opt_state, {"learning_rate": rate, "gradient_norm": norm}

  def _trained(self, names, tree):
    """Returns `tree` with None, an empty node, in the place of frozen leaves."""
    return _where(lambda name: not _is_frozen(self.config, name), names, tree)


def make(config: config_lib.Optim, plan: Plan, depth: int) -> Optimizer:
  """Returns the optimizer of a run.

  Args:
    config: of the optimizer. Its lr, warm-up, decay and clipping norm are not read
      here: their values come with each update.
    plan: lengths in updates.
    depth: blocks of the model, for `layer_decay`.

  Raises:
    ConfigError: lengths that do not fit, or a factor out of range.
  """
  check_plan(plan)
  if config.layer_decay is not None and not 0 < config.layer_decay <= 1:
    raise ConfigError(
      f"optim.layer_decay={config.layer_decay}: expected above 0, at most 1, or None"
    )
  for pattern, factor in config.multipliers:
    if factor < 0:
      raise ConfigError(
        f"optim.multipliers: {pattern!r} has factor {factor}; expected 0 or more"
      )
  return Optimizer(config, plan, depth)


def _adam(config):
  return optax.scale_by_adam(
    b1=config.momentum, b2=config.second_momentum, eps=config.epsilon
  )


def _sgd(config):
  return optax.trace(decay=config.momentum)


def _lion(config):
  return optax.scale_by_lion(b1=config.momentum, b2=config.second_momentum)


def _muon(config):
  """Muon (Jordan et al. 2024) for the matrices of blocks, Adam for all else.

  The momentum of a matrix (with Nesterov's step, and corrected for its start from zero
  as Adam's is, which Jordan's is not) is replaced by the nearest matrix whose singular
  values are all near 1, times 0.2 sqrt(max(rows, columns)) (Liu et al. 2025): entries
  then have the root mean square that Adam's usually have, so that one
  learning rate and one weight decay serve both.
  """
  adam = _adam(config)

  def split(tree):
    """Returns the matrices, those of one kind stacked over blocks, and the rest.

    Stacked, the iteration is compiled once a kind instead of once a matrix.
    """
    names = paths(tree)
    kinds = {}
    for name, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(tree)):
      if _is_matrix(name):
        kinds.setdefault(_kind(name, leaf), []).append(leaf)
    rest = _where(lambda name: not _is_matrix(name), names, tree)
    return {kind: jnp.stack(leaves) for kind, leaves in kinds.items()}, rest

  def join(stacked, rest, like):
    matrices = {kind: iter(list(leaves)) for kind, leaves in stacked.items()}
    return jax.tree.map(
      lambda name, leaf, other: (
        next(matrices[_kind(name, leaf)]) if _is_matrix(name) else other
      ),
      paths(like),
      like,
      rest,
    )

  def orthogonalize(stacked):
    axes = {kind: _stacked_axes(kind) for kind in stacked}
    return contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=axes)

  def match_adam(kind, update):
    rows = math.prod(update.shape[axis] for axis in _stacked_axes(kind).reduction_axis)
    columns = update[0].size // rows
    return 0.2 * math.sqrt(max(rows, columns)) * update

  def init(params):
    stacked, rest = split(params)
    return {"matrices": orthogonalize(stacked).init(stacked), "rest": adam.init(rest)}

  def update(grads, state, params):
    del params
    stacked, rest = split(grads)
    rest, of_rest = adam.update(rest, state["rest"])
    stacked, of_stacked = orthogonalize(stacked).update(stacked, state["matrices"])
    stacked = {kind: match_adam(kind, update) for kind, update in stacked.items()}
    return join(stacked, rest, grads), {"matrices": of_stacked, "rest": of_rest}

  return optax.GradientTransformation(init, update)


# From a clipped gradient to a direction, before decay and learning rate.
RULES = {"adamw": _adam, "sgd": _sgd, "lion": _lion, "lamb": _adam, "muon": _muon}


def _where(wanted, names, tree):
  return jax.tree.map(lambda name, leaf: leaf if wanted(name) else None, names, tree)


def _is_decayed(name):
  return name.split("/")[-1] == "kernel"


def _is_frozen(config, name):
  return config.freeze is not None and re.search(config.freeze, name) is not None


def _is_matrix(name):
  *above, parent, leaf = ["", "", *name.split("/")]
  in_block = any(re.fullmatch(r"block_\d+", part) for part in above)
  return in_block and leaf == "kernel" and parent in _MATRICES


def _kind(name, matrix):
  """Returns what matrices that can be stacked have in common: "query_128x4x32"."""
  return "_".join([name.split("/")[-2], "x".join(map(str, matrix.shape))])


def _stacked_axes(kind):
  axes = _MATRICES[kind.split("_")[0]]
  return contrib.MuonDimensionNumbers(*(tuple(a + 1 for a in part) for part in axes))


def _first_match(config, name):
  """Returns the index of the pattern of `multipliers` that counts, or None."""
  for index, (pattern, _) in enumerate(config.multipliers):
    if re.search(pattern, name):
      return index
  return None


def _factor(config, depth, name):
  index = _first_match(config, name)
  factor = 1.0 if index is None else config.multipliers[index][1]
  if config.layer_decay is not None:
    factor *= config.layer_decay ** (depth + 1 - _layer(depth, name))
  return factor


def _layer(depth, name):
  """Returns 0 for what feeds the blocks, i + 1 for block i, depth + 1 for the rest."""
  # A masked autoencoder holds the ViT as its encoder.
  top = name.removeprefix("encoder/").split("/")[0]
  if top in _BELOW_BLOCKS:
    return 0
  block = re.fullmatch(r"block_(\d+)", top)
  if block is None:
    return depth + 1
  if int(block[1]) >= depth:
    raise ValueError(f"{name} does not belong to a model of depth {depth}")
  return int(block[1]) + 1


def _check_patterns(config, names):
  """Refuses patterns that do nothing, which are misspelt as a rule."""
  some = ", ".join(sorted({name.split("/")[0] for name in names}))
  if config.freeze is not None:
    frozen = sum(_is_frozen(config, name) for name in names)
    if frozen == 0:
      raise ConfigError(
        f"optim.freeze={config.freeze!r} matches no parameter; names start with {some}"
      )
    if frozen == len(names):
      raise ConfigError(
        f"optim.freeze={config.freeze!r} matches every parameter, so nothing would be "
        "trained; leave the head out, as in '^(?!head/)'"
      )
  used = collections.Counter(_first_match(config, name) for name in names)
  for index, (pattern, _) in enumerate(config.multipliers):
    if not used[index]:
      raise ConfigError(
        f"optim.multipliers: {pattern!r} matches no parameter that an earlier pattern "
        f"has not taken; names start with {some}"
      )

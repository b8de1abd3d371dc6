"""The optimizer against optax, NumPy in float64 and closed forms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from vit_jax import config as config_lib
from vit_jax import optim
from vit_jax.config import ConfigError

RULES = ("adamw", "sgd", "lion", "lamb", "muon")
DEPTH = 2
PLAN = optim.Plan(total=20, cooldown=0, warmup=2)
# Every kind of parameter there is.
SHAPES = {
  "tokenizer": {"kernel": (2, 2, 1, 8), "bias": (8,)},
  "positions": (5, 8),
  "cls": (1, 8),
  "registers": (2, 8),
  "block_0": {
    "attention": {"query": {"kernel": (8, 2, 2)}, "out": {"kernel": (2, 2, 8)}}
  },
  "block_1": {
    "attention": {"query": {"kernel": (8, 2, 2)}},
    "mlp": {"up": {"kernel": (8, 12)}},
    "scale_mlp": (8,),
  },
  "norm": {"scale": (8,)},
  "pool": {"probe": (1, 8)},
  "head": {"kernel": (8, 3), "bias": (3,)},
}
KERNELS = {
  "tokenizer/kernel",
  "block_0/attention/query/kernel",
  "block_0/attention/out/kernel",
  "block_1/attention/query/kernel",
  "block_1/mlp/up/kernel",
  "head/kernel",
}
# As matrices of blocks: rows, columns.
MATRICES = {
  "block_0/attention/query/kernel": (8, 4),
  "block_0/attention/out/kernel": (4, 8),
  "block_1/attention/query/kernel": (8, 4),
  "block_1/mlp/up/kernel": (8, 12),
}


def draw(seed, scale=1.0):
  """Returns a tree of NumPy arrays: what is done with them compiles nothing."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: np.asarray(scale * rng.normal(size=shape), np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def zeros():
  return jax.tree.map(np.zeros_like, draw(0))


def add(params, updates):
  return jax.tree.map(lambda p, u: p + np.asarray(u), params, updates)


def norm_of(tree):
  return np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in flat(tree).values()))


def hyper(lr=0.1, warmup=0.0, weight_decay=0.0, clip_norm=np.inf):
  values = dict(lr=lr, warmup=warmup, weight_decay=weight_decay, clip_norm=clip_norm)
  return {"optim": {name: np.float32(value) for name, value in values.items()}}


def settings(name="sgd", schedule="linear", **changes):
  # Far from the defaults, so that a number that does not arrive is seen.
  numbers = dict(momentum=0.7, second_momentum=0.9, epsilon=1e-3)
  return config_lib.Optim(name=name, schedule=schedule, **(numbers | changes))


@functools.cache
def made(config):
  optimizer = optim.make(config, PLAN, DEPTH)
  return optimizer, jax.jit(optimizer.update)


def flat(tree):
  """Returns the leaves by name, found without the code under test."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {"/".join(key.key for key in path): np.asarray(x) for path, x in leaves}


def rates(config, plan, peak, warmup, steps):
  value = hyper(lr=peak, warmup=warmup)
  of_step = jax.vmap(lambda t: optim.learning_rate(config, plan, value, t))
  return np.asarray(of_step(jnp.arange(steps)))


def expected_rate(schedule, peak, warmup, total, cooldown, step):
  """The documented table in float64, one number at a time."""
  t = min(step, total)
  if t < warmup:
    rate = peak * t / warmup
  else:
    done = (t - warmup) / (total - warmup)
    rate = {
      "cosine": peak * np.cos(np.pi / 2 * done) ** 2,
      "linear": peak * (1 - done),
      "rsqrt": peak * np.sqrt(max(warmup, 1) / max(t, warmup, 1)),
      "constant": peak,
    }[schedule]
  left = total - t
  return rate * left / cooldown if left < cooldown else rate


# Learning rate


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rsqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 10, 7.5])
def test_learning_rate_table(schedule, warmup):
  for cooldown in (0, 25):
    plan = optim.Plan(total=100, cooldown=cooldown, warmup=warmup)
    got = rates(config_lib.Optim(schedule=schedule), plan, 0.3, warmup, 110)
    want = [expected_rate(schedule, 0.3, warmup, 100, cooldown, t) for t in range(110)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


def test_learning_rate_written_out():
  plan = optim.Plan(total=100, cooldown=0, warmup=10)
  cosine = rates(config_lib.Optim(schedule="cosine"), plan, 1.0, 10, 106)
  steps = [0, 1, 9, 10, 55, 100, 105]
  want = [0, 0.1, 0.9, 1, 0.5, 0, 0]
  np.testing.assert_allclose(cosine[steps], want, rtol=1e-6, atol=1e-7)
  assert cosine[0] == 0 and cosine[10] == 1 and cosine[100] == 0
  for schedule in ("cosine", "linear", "rsqrt", "constant"):
    at_once = rates(config_lib.Optim(schedule=schedule), plan, 1.0, 0, 1)
    assert at_once[0] == 1
  rsqrt = rates(config_lib.Optim(schedule="rsqrt"), plan, 1.0, 10, 106)
  np.testing.assert_allclose(rsqrt[[10, 40, 90, 105]], [1, 1 / 2, 1 / 3, 0.1**0.5])
  cooled = dataclasses.replace(plan, cooldown=20)
  constant = rates(config_lib.Optim(schedule="constant"), cooled, 1.0, 10, 106)
  np.testing.assert_allclose(
    constant[[79, 80, 85, 90, 100, 105]], [1, 1, 0.75, 0.5, 0, 0]
  )


@pytest.mark.parametrize(
  "lengths",
  [(100, 0, 100), (100, 0, 120), (100, 60, 41), (0, 0, 0), (9, -1, 0), (9, 0, -1)],
)
def test_lengths_that_do_not_fit(lengths):
  with pytest.raises(ConfigError, match="expected|do not fit") as error:
    optim.make(settings(), optim.Plan(*lengths), DEPTH)
  assert "\n" not in str(error.value)
  optim.check_plan(optim.Plan(total=100, cooldown=60, warmup=40))
  optim.check_plan(optim.Plan(total=1, cooldown=0, warmup=0))


def test_logged_rate_is_the_applied_one():
  plan = optim.Plan(total=12, cooldown=3, warmup=4)
  config = settings(schedule="cosine", momentum=0.0)
  optimizer = optim.make(config, plan, 0)
  value = hyper(lr=0.3, warmup=4)
  update = jax.jit(optimizer.update)
  params = {"x": jnp.float32(0.0)}
  state = optimizer.init(params)
  for step in range(15):
    updates, state, info = update({"x": jnp.float32(1.0)}, state, params, step, value)
    moved = add(params, updates)
    assert updates["x"] == -info["learning_rate"]
    want = expected_rate("cosine", 0.3, 4, 12, 3, step)
    np.testing.assert_allclose(params["x"] - moved["x"], want, rtol=1e-5, atol=1e-6)
    params = moved


# Update rules


def optax_rule(name, config, decay, rate, decayed):
  """The same rule out of optax's own optimizers, with constants."""
  first, second, epsilon = config.momentum, config.second_momentum, config.epsilon
  if name == "adamw":
    return optax.adamw(
      rate, b1=first, b2=second, eps=epsilon, weight_decay=decay, mask=decayed
    )
  if name == "sgd":
    return optax.chain(
      optax.sgd(1.0, momentum=first),
      optax.scale(-1.0),
      optax.add_decayed_weights(decay, decayed),
      optax.scale_by_learning_rate(rate),
    )
  if name == "lion":
    return optax.lion(rate, b1=first, b2=second, weight_decay=decay, mask=decayed)
  if name == "lamb":
    return optax.lamb(
      rate, b1=first, b2=second, eps=epsilon, weight_decay=decay, mask=decayed
    )
  # optax.contrib.muon has Nesterov's variant of Adam for the rest, and decays its
  # biases: take its matrices only.
  axes = {
    "query": contrib.MuonDimensionNumbers((0,), (1, 2)),
    "out": contrib.MuonDimensionNumbers((0, 1), (2,)),
    "up": contrib.MuonDimensionNumbers(0, 1),
  }
  matrices = contrib.muon(
    rate,
    beta=first,
    consistent_rms=0.2,
    weight_decay=decay,
    muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: axes[path[-2].key], params
    ),
  )
  rest = optax_rule("adamw", config, decay, rate, None)
  return optax.partition(
    {
      "muon": matrices,
      "decayed": rest,
      "kept": optax_rule("adamw", config, 0.0, rate, None),
    },
    lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: (
        "kept"
        if path[-1].key != "kernel"
        else "muon"
        if path[0].key.startswith("block")
        else "decayed"
      ),
      params,
    ),
  )


@pytest.mark.parametrize("name", RULES)
def test_rule_against_optax(name):
  config, decay = settings(name), 0.2
  optimizer, update = made(config)
  table = jnp.asarray([expected_rate("linear", 0.1, 2, 20, 0, t) for t in range(4)])
  ours = theirs = draw(0)
  decayed = jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key == "kernel", ours
  )
  reference = optax.chain(
    optax.clip_by_global_norm(10.0),
    optax_rule(name, config, decay, lambda count: table[count], decayed),
  )
  step_theirs = jax.jit(reference.update)
  state, state_theirs = optimizer.init(ours), reference.init(theirs)
  value = hyper(lr=0.1, warmup=2, weight_decay=decay, clip_norm=10.0)
  for step, scale in enumerate((1.0, 0.1, 3.0, 0.2)):  # clipped, not, clipped, not
    grads = draw(step + 1, scale)
    updates, state, info = update(grads, state, ours, step, value)
    ours = add(ours, updates)
    updates, state_theirs = step_theirs(grads, state_theirs, theirs)
    theirs = add(theirs, updates)
    np.testing.assert_allclose(info["gradient_norm"], norm_of(grads), rtol=1e-5)
  theirs = flat(theirs)
  for key, got in flat(ours).items():
    np.testing.assert_allclose(got, theirs[key], rtol=2e-5, atol=5e-6, err_msg=key)


def test_adamw_against_numpy():
  config = settings("adamw")
  optimizer, update = made(config)
  params = draw(0)
  state = optimizer.init(params)
  value = hyper(lr=0.05, warmup=2, weight_decay=0.3, clip_norm=5.0)
  want = {k: v.astype(np.float64) for k, v in flat(params).items()}
  first = {k: 0.0 for k in want}
  second = {k: 0.0 for k in want}
  for step in range(5):
    grads = draw(step + 10, 2.0)
    updates, state, _ = update(grads, state, params, step, value)
    params = add(params, updates)
    g = {k: v.astype(np.float64) for k, v in flat(grads).items()}
    norm = np.sqrt(sum((x**2).sum() for x in g.values()))
    rate = expected_rate("linear", 0.05, 2, 20, 0, step)
    for k in want:
      clipped = g[k] * min(1.0, 5.0 / norm)
      first[k] = 0.7 * first[k] + 0.3 * clipped
      second[k] = 0.9 * second[k] + 0.1 * clipped**2
      mean = first[k] / (1 - 0.7 ** (step + 1))
      root = np.sqrt(second[k] / (1 - 0.9 ** (step + 1)))
      decay = 0.3 * want[k] if k in KERNELS else 0.0
      want[k] = want[k] - rate * (mean / (root + 1e-3) + decay)
  for k, v in flat(params).items():
    np.testing.assert_allclose(v, want[k], rtol=1e-5, atol=2e-6, err_msg=k)


def test_muon_makes_matrices_orthogonal():
  optimizer, update = made(settings("muon"))
  params, grads = draw(0), draw(1)
  updates, _, _ = update(grads, optimizer.init(params), params, 0, hyper(lr=0.5))
  updates, grads = flat(updates), flat(grads)
  for name, (rows, columns) in MATRICES.items():
    matrix = updates[name].reshape(rows, columns).astype(np.float64) / 0.5
    values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(rows, columns) ** 0.5)
    assert values.min() > 0.6 and values.max() < 1.3, (name, values)
    assert 0.14 < np.sqrt((matrix**2).mean()) < 0.26
  # All else is Adam's: at the first update the sign of the gradient.
  for name in ("head/kernel", "tokenizer/kernel", "positions", "norm/scale"):
    want = -0.5 * grads[name] / (np.abs(grads[name]) + 1e-3)
    np.testing.assert_allclose(updates[name], want, rtol=1e-4, err_msg=name)


# Decay, clipping


@pytest.mark.parametrize("name", RULES)
def test_only_kernels_decay(name):
  optimizer, update = made(settings(name))
  params = draw(0)
  # "lamb" puts the decay through the trust ratio |p| / |decay p|: the rate is all.
  rate = 0.1 if name == "lamb" else 1.0
  updates, _, _ = update(
    zeros(),
    optimizer.init(params),
    params,
    0,
    hyper(lr=rate, weight_decay=0.1),
  )
  before, after = flat(params), flat(add(params, updates))
  for key in before:
    if key in KERNELS:
      np.testing.assert_allclose(after[key], 0.9 * before[key], rtol=1e-5, err_msg=key)
    else:
      np.testing.assert_array_equal(after[key], before[key], err_msg=key)
  assert {k for k, on in optim.decayed(params).items() if on} == KERNELS
  assert set(optim.decayed(params)) == set(before)


def test_clipping():
  optimizer, update = made(settings("sgd"))
  params, grads = draw(0), draw(1)
  state = optimizer.init(params)
  norm = norm_of(grads)

  def clipped(limit):
    updates, _, info = update(grads, state, params, 0, hyper(lr=1.0, clip_norm=limit))
    np.testing.assert_allclose(info["gradient_norm"], norm, rtol=1e-6)
    return updates

  np.testing.assert_allclose(norm_of(clipped(1e-6)), 1e-6, rtol=1e-5)
  np.testing.assert_allclose(norm_of(clipped(2.0)), 2.0, rtol=1e-5)
  for off in (np.inf, 0.0, 2 * norm):
    jax.tree.map(lambda u, g: np.testing.assert_array_equal(u, -g), clipped(off), grads)


def test_clipping_of_a_zero_gradient():
  optimizer, update = made(settings("sgd"))
  params = draw(0)
  for limit in (np.inf, 1.0, 0.0):
    updates, _, info = update(
      zeros(), optimizer.init(params), params, 0, hyper(clip_norm=limit)
    )
    assert info["gradient_norm"] == 0
    assert all(not np.any(u) for u in jax.tree.leaves(updates))


# Members


# Both look at a parameter as a whole, which a member axis must not enter.
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_members_equal_each_alone(name):
  optimizer, update = made(settings(name))
  values = [
    hyper(lr=0.1, warmup=0, weight_decay=0.1, clip_norm=np.inf),
    hyper(lr=0.3, warmup=4, weight_decay=0.0, clip_norm=1.0),
  ]
  # Few parameters: a map over members is slow to compile.
  part = lambda seed: {k: draw(seed)[k] for k in ("block_0", "cls")}  # noqa: E731
  params, grads = [part(0), part(1)], [part(2), part(3)]
  stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)  # noqa: E731
  state = jax.vmap(optimizer.init)(stack(params))
  together = jax.jit(jax.vmap(optimizer.update, in_axes=(0, 0, 0, None, 0)))
  updates, state, info = together(stack(grads), state, stack(params), 2, stack(values))
  for member in range(2):
    alone = update(
      grads[member], optimizer.init(params[member]), params[member], 2, values[member]
    )
    jax.tree.map(
      lambda a, b, m=member: np.testing.assert_allclose(a, b[m], rtol=1e-5, atol=1e-6),
      alone,
      (updates, state, info),
    )
  np.testing.assert_allclose(info["learning_rate"], [0.09, 0.15], rtol=1e-6)


def test_one_program_for_all_values():
  optimizer = optim.make(settings("sgd"), PLAN, DEPTH)
  traces = []

  def counted(*args):
    traces.append(1)
    return optimizer.update(*args)

  update = jax.jit(counted)
  params = {"head": {"kernel": jnp.ones((2, 2))}}
  state = optimizer.init(params)
  for step, clip_norm, warmup in ((0, np.inf, 0), (1, 1.0, 5), (7, 0.0, 2.5)):
    value = hyper(warmup=warmup, clip_norm=clip_norm)
    _, state, info = update(params, state, params, step, value)
    want = expected_rate("linear", 0.1, warmup, 20, 0, step)
    np.testing.assert_allclose(info["learning_rate"], want, rtol=1e-6)
  assert len(traces) == 1


@pytest.mark.parametrize("name", RULES)
def test_state_is_a_plain_tree(name):
  sizes = []
  for freeze in (None, "^block_0"):
    optimizer = optim.make(settings(name, freeze=freeze), PLAN, DEPTH)
    params = draw(0)
    state = optimizer.init(params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    shapes = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    _, after, _ = jax.eval_shape(optimizer.update, params, state, params, 0, hyper())
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, state, after))
    sizes.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
  # No moment is kept for what is frozen: two matrices of 32 entries.
  moments = {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1, "muon": 1}
  assert sizes[0] - sizes[1] == moments[name] * 2 * 32


# Factors and frozen parameters


def test_freeze():
  params, grads = draw(0), draw(1)
  frozen = ("tokenizer", "positions", "cls", "block_0")
  config = settings("lamb", freeze="^(tokenizer|positions|cls|block_0)")
  optimizer, update = made(config)
  value = hyper(weight_decay=0.1)
  updates, _, info = update(grads, optimizer.init(params), params, 0, value)
  everything, update_all = made(settings("lamb"))
  free, _, _ = update_all(grads, everything.init(params), params, 0, value)
  for key in SHAPES:
    want = jax.tree.map(np.zeros_like, free[key]) if key in frozen else free[key]
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates[key], want
    )
  # What is not trained does not count for the clipping either.
  rest = {k: v for k, v in grads.items() if k not in frozen}
  np.testing.assert_allclose(info["gradient_norm"], norm_of(rest), rtol=1e-6)


def test_multipliers_first_match_counts():
  params, grads = draw(0), draw(1)
  patterns = (("^head/", 10.0), ("kernel$", 0.5))
  optimizer, update = made(settings("sgd", multipliers=patterns))
  value = hyper(lr=0.1, weight_decay=0.1)
  updates, _, info = update(grads, optimizer.init(params), params, 0, value)
  np.testing.assert_allclose(info["learning_rate"], 0.1, rtol=1e-6)
  params, grads = flat(params), flat(grads)
  for name, got in flat(updates).items():
    factor = 10.0 if name.startswith("head/") else 0.5 if name in KERNELS else 1.0
    decay = 0.1 * params[name] if name in KERNELS else 0.0
    want = -0.1 * factor * (grads[name] + decay)
    np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)


def test_layer_decay():
  params, grads = draw(0), draw(1)
  config = settings("sgd", layer_decay=0.5, multipliers=(("cls", 3.0),))
  optimizer, update = made(config)
  updates, _, _ = update(grads, optimizer.init(params), params, 0, hyper(lr=0.1))
  factors = {
    **dict.fromkeys(("tokenizer", "positions", "registers"), 1 / 8),
    "cls": 3 / 8,
    "block_0": 1 / 4,
    "block_1": 1 / 2,
    **dict.fromkeys(("norm", "pool", "head"), 1.0),
  }
  for key, factor in factors.items():
    jax.tree.map(
      lambda u, g, f=factor: np.testing.assert_allclose(u, -0.1 * f * g, rtol=1e-5),
      updates[key],
      grads[key],
    )
  rows = optim.table(config, jax.eval_shape(lambda: params), DEPTH)
  assert {r.name: r.factor for r in rows} == {
    name: factors[name.split("/")[0]] for name in flat(params)
  }
  with pytest.raises(ValueError, match="block_1/.* depth 1"):
    optim.table(config, params, 1)


def test_layer_decay_of_a_masked_autoencoder():
  """Its encoder is the ViT; its decoder comes after all blocks."""
  vit = jax.eval_shape(lambda: draw(0))
  params = {"encoder": vit, "decoder": {"block_0": vit["block_0"]}}
  config = settings("sgd", layer_decay=0.5)
  plain = {r.name: r.factor for r in optim.table(config, vit, DEPTH)}
  for row in optim.table(config, params, DEPTH):
    inside = row.name.startswith("encoder/")
    assert row.factor == (plain[row.name.removeprefix("encoder/")] if inside else 1.0)


def test_table():
  params = draw(0)
  rows = optim.table(settings("adamw", freeze="^block_0/"), params, DEPTH)
  leaves = flat(params)
  assert [row.name for row in rows] == list(leaves)
  for row in rows:
    assert row.shape == leaves[row.name].shape
    assert row.frozen == row.name.startswith("block_0/")
    assert row.decayed == (row.name in KERNELS and not row.frozen)
    assert row.factor == 1.0


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    (dict(freeze="blok_0"), "freeze='blok_0' matches no parameter"),
    (dict(freeze="."), "matches every parameter"),
    (dict(multipliers=(("haed", 2.0),)), "'haed' matches no parameter"),
    (dict(multipliers=(("a", 2.0), ("head/bias", 3.0))), "'head/bias' matches no"),
  ],
)
def test_patterns_that_select_nothing(changes, text):
  config = settings(**changes)
  with pytest.raises(ConfigError, match=text) as error:
    optim.make(config, PLAN, DEPTH).init(draw(0))
  assert "\n" not in str(error.value)
  with pytest.raises(ConfigError, match=text):
    optim.table(config, draw(0), DEPTH)


@pytest.mark.parametrize(
  "changes",
  [dict(layer_decay=0.0), dict(layer_decay=1.5), dict(multipliers=(("head", -1.0),))],
)
def test_factors_out_of_range(changes):
  with pytest.raises(ConfigError, match="expected"):
    optim.make(settings(**changes), PLAN, DEPTH)


def test_paths():
  tree = {"block_0": {"mlp": [1, 2]}, "head": 3}
  names = {"block_0": {"mlp": ["block_0/mlp/0", "block_0/mlp/1"]}, "head": "head"}
  assert optim.paths(tree) == names

"""Starting from another run: what is taken, what is refused, what is said."""

import jax
import numpy as np
import pytest

from vit_jax import checkpoint, config, devices, models, optim, records, steps, transfer
from vit_jax.config import ConfigError, Init, Pair

SMALL = {
  "model.patch": 4,
  "model.width": 16,
  "model.depth": 1,
  "model.heads": 2,
  "model.pool": "mean",
  "data.batch_size": 4,
}
SHAPE = (8, 8, 1)


def parts(changes=(), classes=10):
  """Returns the configuration, the steps and the traced settings of a run."""
  c = config.override(config.Config(), SMALL | dict(changes))
  model = models.build(c, Pair(*SHAPE[:2]), classes)
  optimizer = optim.make(c.optim, optim.Plan(4, 0, 1.0), c.model.depth)
  inputs = steps.Inputs(SHAPE, classes, (0.5,), (0.25,))
  made = steps.make(c, model, None, optimizer, inputs)
  return c, made, steps.hyper(c, 1.0, models.traceable(c.model))


def filled(made, hyper, seed):
  """Returns a state of one member: random parameters, all else 0; compiles nothing."""
  draw = np.random.default_rng(seed)
  shapes = jax.eval_shape(made.init, hyper)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  for name in ("params", "ema"):
    if name in state:
      state[name] = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32), state[name]
      )
  return state


def write_run(folder, changes=(), classes=10):
  """Writes a run folder with one checkpoint; returns its parameters by name."""
  c, made, hyper = parts(changes, classes)
  params = filled(made, hyper, seed=1)["params"]
  names = [str(i) for i in range(classes)]
  content = {
    "schema": 1,
    "config": config.to_dict(c),
    "external": [],
    "data": {"name": "x", "shape": list(SHAPE), "classes": names},
  }
  folder.mkdir()
  records.write_json(folder / "config.json", content)
  members = [{"name": "0", "overrides": {}}]
  records.write_json(folder / "members.json", {"schema": 1, "members": members})
  saver = checkpoint.Saver(folder, checkpoint.Keep())
  state = {"params": jax.tree.map(lambda x: jax.numpy.asarray(x[None]), params)}
  saver.save(7, state, {"metrics": {}})
  saver.close()
  return checkpoint.flatten(params)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "source"
  return folder, write_run(folder)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "masked"
  return folder, write_run(folder, {"loss.name": "mae"})


def started(folder, changes=(), classes=10, *, partial=False, members=1, names=None):
  """Starts a state of this many members from a run; returns it before and after."""
  c, made, hyper = parts(changes, classes)
  layout = devices.make(c, made, members)
  states = [filled(made, hyper, seed=2 + i) for i in range(members)]
  state = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
  if isinstance(layout, devices.Pmap):
    placed = layout.place(state)
  else:
    hypers = jax.tree.map(lambda x: np.stack([x] * members), hyper)
    placed = jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), state, layout.abstract(hypers)
    )
  new = transfer.start_from(Init(str(folder), partial), placed, layout, names)
  same = jax.tree.map(lambda a, b: a.sharding == b.sharding, placed, new)
  assert all(jax.tree.leaves(same))
  return jax.device_get(layout.single(placed)), jax.device_get(layout.single(new))


@pytest.mark.parametrize(
  "layout", [{}, {"train.fsdp": True}, {"train.parallel": "pmap"}]
)
def test_every_member_starts_at_the_source(source, layout):
  folder, params = source
  old, new = started(folder, {"optim.ema": 0.9, **layout}, members=2)
  for part in ("params", "ema"):
    for name, leaf in checkpoint.flatten(new[part]).items():
      for member in leaf:
        np.testing.assert_array_equal(member, params[name])
  for part in ("opt_state", "step"):
    jax.tree.map(np.testing.assert_array_equal, old[part], new[part])


def test_fsdp_cuts_a_parameter():
  """So that the test above says something about parts of arrays."""
  _, made, hyper = parts({"train.fsdp": True})
  layout = devices.Jit(made, 1, fsdp=True)
  shapes = layout.abstract(jax.tree.map(lambda x: x[None], hyper))
  whole = [x.sharding.is_fully_replicated for x in jax.tree.leaves(shapes)]
  assert not all(whole)


def test_params_and_average_do_not_share_memory(source):
  """The step writes over the state in place."""
  folder, _ = source
  _, made, hyper = parts({"optim.ema": 0.9})
  layout = devices.Jit(made, 1, fsdp=False)
  state = jax.tree.map(lambda x: layout.put(x[None]), filled(made, hyper, 2))
  new = transfer.start_from(Init(str(folder)), state, layout)

  def pointers(tree):
    return {
      s.data.unsafe_buffer_pointer()
      for leaf in jax.tree.leaves(tree)
      for s in leaf.addressable_shards
    }

  assert not pointers(new["params"]) & pointers(new["ema"])


@pytest.mark.parametrize(
  ("changes", "classes", "texts"),
  [
    ({"model.depth": 2}, 10, ["missing block_1/attention/key/bias"]),
    ({"model.width": 8}, 10, ["key/bias is (2, 8), expected (2, 4);", "and 10 more"]),
    ({}, 3, ["head/kernel is (16, 10), expected (16, 3) (other classes)"]),
    ({"model.pool": "cls"}, 10, ["expected (5, 16) (another grid", "not resized"]),
    ({"model.positions": "none"}, 10, ["extra positions"]),
  ],
)
def test_a_difference_is_refused_by_name(source, changes, classes, texts):
  with pytest.raises(ConfigError) as error:
    started(source[0], changes, classes)
  for text in [*texts, "init.partial=True", "(step 7)"]:
    assert text in str(error.value)


def test_partial_takes_the_rest_and_says_so(source, capsys):
  folder, params = source
  changes = {"model.positions": "sincos2d", "model.depth": 2}
  old, new = started(folder, changes, 3, partial=True)
  before, after = checkpoint.flatten(old["params"]), checkpoint.flatten(new["params"])
  for name, leaf in after.items():
    random = name.startswith(("head/", "block_1/"))
    np.testing.assert_array_equal(leaf[0], before[name][0] if random else params[name])
  said = capsys.readouterr().out
  assert f"taken           {len(params) - 3} of {len(after)}" in said
  assert "left at random  block_1/ (16 arrays), missing there" in said
  assert "left at random  head/kernel is (16, 10), expected (16, 3)" in said
  assert "not used        positions" in said
  assert "(other classes)" in said


def test_a_masked_autoencoder_gives_its_encoder(masked, capsys):
  folder, params = masked
  with pytest.raises(ConfigError, match="missing head/bias.*extra decoder/"):
    started(folder)
  old, new = started(folder, partial=True)
  before = checkpoint.flatten(old["params"])
  for name, leaf in checkpoint.flatten(new["params"]).items():
    wanted = before[name][0] if name.startswith("head/") else params[f"encoder/{name}"]
    np.testing.assert_array_equal(leaf[0], wanted)
  assert "not used        decoder/ (" in capsys.readouterr().out


def test_a_masked_autoencoder_starts_another_one(masked):
  folder, params = masked
  _, new = started(folder, {"loss.name": "mae"})
  for name, leaf in checkpoint.flatten(new["params"]).items():
    np.testing.assert_array_equal(leaf[0], params[name])


def test_a_head_for_other_classes_of_equal_number_is_not_taken(source, capsys):
  folder, params = source
  names = [str(i) for i in range(10)]
  started(folder, names=names)
  with pytest.raises(ConfigError, match="head/bias is for other classes"):
    started(folder, names=names[::-1])
  _, new = started(folder, names=names[::-1], partial=True)
  assert not np.array_equal(new["params"]["head"]["kernel"][0], params["head/kernel"])
  assert "left at random  head/kernel is for other classes" in capsys.readouterr().out


def test_other_types_and_strange_sources(source, tmp_path):
  f32, f16 = (jax.ShapeDtypeStruct((2,), d) for d in ("float32", "float16"))
  assert transfer.match({"a": f32}, {"a": f16}).other == {
    "a": "is float32, expected float16"
  }
  with pytest.raises(ConfigError, match="not a run folder"):
    started(tmp_path)
  with pytest.raises(ConfigError, match="no parameter that fits"):
    started(source[0], {"loss.name": "mae"}, partial=True)


@pytest.mark.parametrize(
  "changes, seeds, warned",
  [
    ({"data.name": "digits"}, [0, 0], False),
    ({"data.name": "digits"}, [0, 3], True),
    ({"data.name": "digits:half"}, [3], False),
    ({"data.name": "digits:half", "data.val": 0.1}, [3], True),
  ],
)
def test_another_seed_draws_other_test_images(changes, seeds, warned):
  text = transfer.other_split(config.override(config.Config(), changes), seeds)
  assert bool(text) == warned
  if warned:
    assert "seed 0, this run has seed 3" in text and "--config.seed=0" in text

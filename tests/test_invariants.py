"""The nine promises of the design, each as a test."""

import ast
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from vit_jax import (
  checkpoint,
  config,
  devices,
  evaluate,
  feed,
  records,
  steps,
  train,
)
from vit_jax.config import ConfigError
from vit_jax.data import batches
from vit_jax.loop import Loop

ROOT = pathlib.Path(__file__).parents[1]


def leaves(state):
  return {k: np.asarray(v) for k, v in checkpoint.flatten(state).items()}


def assert_same(a, b, tolerance=0.0):
  a, b = leaves(a), leaves(b)
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_allclose(a[name], b[name], atol=tolerance, rtol=0, err_msg=name)


# 1. A config value has one owner, and is read.


def test_every_setting_is_read(tmp_path, monkeypatch):
  """Runs a few small jobs and notes which settings code outside config.py reads."""
  read = set()
  for group in dataclasses.fields(config.Config):
    cls = group.type if isinstance(group.type, type) else None
    if cls is None or not dataclasses.is_dataclass(cls):
      continue

    def note(self, name, *, prefix=group.name):
      caller = sys._getframe(1).f_globals["__name__"]
      if caller != "vit_jax.config" and caller.startswith("vit_jax"):
        read.add(f"{prefix}.{name}")
      return object.__getattribute__(self, name)

    monkeypatch.setattr(cls, "__getattribute__", note, raising=False)
  jobs = [
    tiny.make(optim__name="muon", train__best_metric="val/accuracy", data__val=0.1),
    tiny.make(optim__name="lamb", loss__name="mae", optim__freeze="cls"),
  ]
  for i, job in enumerate(jobs):
    train.run(config.override(job, {"train.length": "3 steps"}), tmp_path / str(i))
  with pytest.raises(ConfigError):
    train.run(config.override(jobs[0], {"init.source": "nowhere"}), tmp_path / "x")
  with pytest.raises(ConfigError):
    train.prepare(config.override(jobs[0], {"data.name": "folder"}))
  known = {n for n in config.names() if n != "seed"}
  # Read only where a picture cannot be decoded, or a partial start is asked for.
  rare = {"data.unreadable": "data", "init.partial": "."}
  for name, folder in rare.items():
    attributes = {
      node.attr
      for file in (ROOT / "vit_jax" / folder).glob("*.py")
      if file.name != "config.py"
      for node in ast.walk(ast.parse(file.read_text()))
      if isinstance(node, ast.Attribute)
    }
    assert name.split(".")[1] in attributes
  assert known - read - set(rare) == set()


def test_an_unread_setting_would_be_noticed():
  assert "model.width" in config.names()
  with pytest.raises(ConfigError, match="did you mean 'model.dropout'|'dropout'"):
    config.override(config.Config(), {"model.drpout": 0.1})


# 2. A step is pure; keys come from named streams and the global step.


def test_step_is_pure(tmp_path):
  cfg = tiny.make(model__dropout=0.2, augment__crop=1)
  loop, _, _ = tiny.steps(cfg, tmp_path)
  job = loop.job
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  state = job.steps.init(hyper)
  batch = {
    "image": job.data.train.images[:8],
    "label": job.data.train.labels[:8],
    **batches.rows((8,)),
  }
  before = leaves(state)
  first = job.steps.train_step(state, batch, hyper)
  second = job.steps.train_step(state, batch, hyper)
  assert_same(first, second)
  assert_same(before, state)


def test_no_two_streams_share_a_key():
  words = steps.seed_words(0)
  rows = np.arange(4, dtype=np.int32)
  seen = [jax.random.key_data(steps.stream(words, "init")).reshape(1, 2)]
  for name in ("augment", "model"):
    keys = jax.jit(
      jax.vmap(lambda step, name=name: steps.row_keys(words, name, step, rows))
    )(np.arange(51))
    seen.append(np.asarray(jax.random.key_data(keys)).reshape(-1, 2))
  seen = np.concatenate(seen)
  assert len(np.unique(seen, axis=0)) == len(seen)


@pytest.mark.parametrize("pair", [(0, 2**32), (0, 2**40), (2**32 - 1, 2**64 - 1)])
def test_large_seeds_differ(pair):
  first, second = (steps.seed_words(seed) for seed in pair)
  assert (first != second).any()


# 3. One to many is a transform.


CHANGES = [{"seed": 3}, {"optim.lr": 3e-3, "seed": 4}, {"augment.mixup": 0.5}]


def test_members_equal_runs_alone(tmp_path):
  cfg = tiny.make(model__dropout=0.1, optim__ema=0.9, augment__mixup=0.2)
  _, together, _ = tiny.steps(cfg, tmp_path, members=CHANGES)
  for k, change in enumerate(CHANGES):
    _, alone, _ = tiny.steps(cfg, tmp_path, members=[change])
    assert_same(
      jax.tree.map(lambda leaf: leaf[0], alone),
      jax.tree.map(lambda leaf, k=k: leaf[k], together),
    )


def test_members_side_by_side_equal_those_in_turn(tmp_path):
  """Under SGD: Adam divides the rounding of the first gradients by their size."""
  cfg = tiny.make(model__dropout=0.1, augment__mixup=0.2, optim__name="sgd")
  side = config.override(cfg, {"train.members_at_once": 3})
  _, one, expected = tiny.steps(cfg, tmp_path, members=CHANGES)
  _, other, found = tiny.steps(side, tmp_path, members=CHANGES)
  for name in ("loss", "gradient_norm"):
    np.testing.assert_allclose(
      found[0][name], expected[0][name], rtol=1e-6, atol=1e-6, err_msg=name
    )
  assert_same(other["params"], one["params"], tolerance=1e-6)
  assert other["step"].tolist() == [5, 5, 5]


# 4. batch(step) is a function of seed and step.


def test_order_is_a_function_of_seed_and_step():
  orders = [batches.Order(seed=1, examples=10)]
  whole = batches.index_batches(orders, 0, 5, 4)["index"][0]
  # Two epochs of 10 examples in 5 batches of 4: each example exactly twice.
  assert np.bincount(whole.reshape(-1), minlength=10).tolist() == [2] * 10
  assert sorted(whole.reshape(-1)[:10]) == list(range(10))
  for step in range(5):
    one = batches.index_batches(orders, step, 1, 4)["index"][0, 0]
    assert (one == whole[step]).all()
  other = batches.index_batches([batches.Order(2, 10)], 0, 5, 4)["index"][0]
  assert (other != whole).any()


def test_order_stays_as_it_was():
  """Resuming needs the order of old versions; these numbers may never change."""
  first = batches.permutation(0, 0, 10).tolist()
  assert first == GOLDEN_ORDER


GOLDEN_ORDER = [5, 8, 0, 4, 6, 2, 3, 9, 7, 1]


def test_resumed_equals_unbroken(tmp_path, monkeypatch):
  """A run that dies after any step and is started again ends with the same bits."""
  cfg = tiny.make(
    optim__accumulate=2,
    optim__ema=0.9,
    model__dropout=0.1,
    augment__crop=1,
    train__steps_per_call=3,
    train__checkpoint_every="4 steps",
  )
  train.run(cfg, tmp_path / "unbroken")

  class Killed(BaseException):
    pass

  after = Loop._after_call
  for death in (3, 6, 9):

    def die(self, *arguments, death=death):
      after(self, *arguments)
      if self.step >= death and not (tmp_path / f"died{death}").exists():
        (tmp_path / f"died{death}").touch()
        raise Killed

    with monkeypatch.context() as patch:
      patch.setattr(Loop, "_after_call", die)
      with pytest.raises(Killed):
        train.run(cfg, tmp_path / "broken")
  train.run(cfg, tmp_path / "broken")
  states = []
  for name in ("unbroken", "broken"):
    job = train.prepare(cfg)
    layout = devices.make(cfg, job.steps, 1)
    step, state, _ = checkpoint.newest_whole(
      tmp_path / name, layout.abstract(job.hypers)
    )
    assert step == 10
    states.append(jax.device_get(state))
  assert_same(*states)
  rows = [records.read(tmp_path / name) for name in ("unbroken", "broken")]
  assert records.equal(*rows) == []


# 5. Evaluation sees every example once and never touches the training state.


def test_evaluation_changes_nothing(tmp_path):
  often = tiny.make(train__eval_every="1 step", data__val=0.1)
  never = tiny.make(data__val=0.1)
  train.run(often, tmp_path / "often")
  train.run(never, tmp_path / "never")
  a = checkpoint.load_params(tmp_path / "often")[0]
  b = checkpoint.load_params(tmp_path / "never")[0]
  assert_same(a, b)


def test_padding_is_not_counted(tmp_path):
  cfg = tiny.make()
  loop, state, _ = tiny.steps(cfg, tmp_path)
  split = loop.job.data.test
  some = type(split)(split.images[:13], split.labels[:13])
  params = loop.layout.put(state["params"])
  found = [
    evaluate.values(loop.layout, params, loop.hypers, [some], size)[0]
    for size in (1, 3, 13, 64)
  ]
  for other in found:
    assert len(other["predicted"]) == 13
    assert (other["predicted"] == found[0]["predicted"]).all()
    np.testing.assert_allclose(other["loss"], found[0]["loss"], rtol=1e-5, atol=1e-6)


# 6. The run folder is self-describing.


def test_evaluate_needs_the_run_folder_only(tmp_path):
  cfg = tiny.make()
  result = train.run(cfg, tmp_path / "run")
  shutil.copytree(tmp_path / "run", tmp_path / "else where")
  out = subprocess.run(
    [
      sys.executable,
      str(ROOT / "scripts" / "evaluate.py"),
      "--workdir=else where",
      "--out=out.json",
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  assert out.returncode == 0, out.stderr
  found = json.loads((tmp_path / "out.json").read_text())
  # The number of the log, to the last digit.
  assert found["accuracy"] == result["0"]["test/accuracy"]
  np.testing.assert_allclose(found["loss"], result["0"]["test/loss"], rtol=1e-6)


# 7. What loads, loads exactly or is refused.


def test_other_model_is_refused(tmp_path):
  train.run(tiny.make(), tmp_path)
  job = train.prepare(tiny.make(model__depth=3, model__width=24))
  layout = devices.make(job.config, job.steps, 1)
  template = layout.abstract(job.hypers)
  with pytest.raises(ConfigError) as error:
    checkpoint.newest_whole(tmp_path, template)
  assert "block_2" in str(error.value) or "expected" in str(error.value)
  assert "\n" not in str(error.value)


def test_changed_bits_are_refused(tmp_path, caplog):
  train.run(tiny.make(), tmp_path)
  newest = tmp_path / "checkpoints" / "10"
  # Orbax keeps the values of a small state twice; both copies are changed.
  files = sorted(
    (f for f in newest.glob("arrays/**/d/*") if f.is_file()), key=os.path.getsize
  )
  for file in files:
    content = bytearray(file.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = bytes(2 * quarter)
    file.write_bytes(bytes(content))
  digest = hashlib.sha256(bytes(content)).hexdigest()
  job = train.prepare(tiny.make())
  layout = devices.make(job.config, job.steps, 1)
  with caplog.at_level(logging.WARNING):
    step, _, _ = checkpoint.newest_whole(tmp_path, layout.abstract(job.hypers))
  assert step == 5
  assert str(newest) in caplog.text
  assert hashlib.sha256(files[-1].read_bytes()).hexdigest() == digest


# 8. An error says what came, what was expected, what to try, in one line.


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"model.heads": 3}, ["model.heads=3", "model.width=16", "try"]),
    ({"model.patch": 3}, ["8", "model.patch=3", "try"]),
    ({"model.stride": 5}, ["model.stride", "model.patch", "try"]),
    ({"data.name": "digit"}, ["digit", "digits"]),
    ({"data.batch_size": 6}, ["data.batch_size=6", "4 devices", "try 4 or 8"]),
    ({"optim.warmup": "10 steps"}, ["warmup", "10"]),
    ({"train.length": "3 parsecs"}, ["3 parsecs", "30 epochs", "5 %"]),
    ({"train.best_metric": "test/accuracy"}, ["test/accuracy", "val/accuracy"]),
    ({"train.best_metric": "val/accuracy"}, ["data.val", "try"]),
    (
      {"train.parallel": "pmap", "optim.accumulate": 4},
      ["data.batch_size=8 over 4 devices", "multiple of 16", 'train.parallel="jit"'],
    ),
    (
      {"train.parallel": "pmap", "augment.mixup": 0.2, "data.batch_size": 4},
      ["data.batch_size=4 over 4 devices", "mixing", "multiple of 8"],
    ),
    ({"optim.freeze": "nothing_like_this"}, ["nothing_like_this"]),
    ({"train.length": "10 %"}, ["10 %", "30 epochs"]),
  ],
)
def test_errors_are_one_line(changes, words, tmp_path):
  with pytest.raises(ConfigError) as error:
    train.run(config.override(tiny.make(), changes), tmp_path)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)
  assert not (tmp_path / "metrics.jsonl").exists()


def test_best_of_several_members_is_refused(tmp_path):
  cfg = tiny.make(data__val=0.2, train__best_metric="val/loss")
  with pytest.raises(ConfigError, match="val/loss' is for one member"):
    train.run(cfg, tmp_path, members=[{"seed": 0}, {"seed": 1}])


# 9. jit and pmap are two wrappers of the same step.


def test_devices_agree(tmp_path, monkeypatch):
  cfg = tiny.make(
    optim__name="sgd",
    model__dropout=0.1,
    model__drop_path=0.2,
    augment__mixup=0.3,
    optim__ema=0.9,
    train__steps_per_call=2,
  )
  assert jax.device_count() == 4
  found = {
    name: tiny.steps(config.override(cfg, changes), tmp_path)
    for name, changes in {
      "jit": {},
      "fsdp": {"train.fsdp": True},
      "pmap": {"train.parallel": "pmap"},
      "accumulate": {"optim.accumulate": 2},
    }.items()
  }
  make_mesh = jax.make_mesh
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  monkeypatch.setattr(
    jax,
    "make_mesh",
    lambda _, names, axis_types: make_mesh(
      (1,), names, axis_types=axis_types, devices=one
    ),
  )
  _, state, metrics = tiny.steps(cfg, tmp_path)
  for name, (_, other, history) in found.items():
    for key in ("loss", "gradient_norm"):
      np.testing.assert_allclose(
        history[0][key], metrics[0][key], rtol=1e-6, atol=1e-6, err_msg=name
      )
    # Under SGD parameters differ by the learning rate times the gradients.
    assert_same(other["params"], state["params"], tolerance=1e-6)


def test_one_all_reduce_a_step(tmp_path):
  import re

  loop = Loop(train.prepare(tiny.make()), tmp_path, tiny.Silent())
  source = feed.make(loop.job, loop.layout, 0)
  span = np.array([0, 5], np.int32)
  lowered = loop.layout.lower(source.next(0, 5), loop.hypers, *source.data, span)
  text = lowered.compile().as_text()
  counts = {
    kind: len(re.findall(rf" {kind}(?:-start)?\(", text))
    for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
  }
  assert counts == {
    "all-reduce": 1,
    "all-gather": 0,
    "all-to-all": 0,
    "collective-permute": 0,
  }


def test_fsdp_holds_a_quarter_of_the_state_on_each_of_four_devices():
  """Of the reference model; what is too small to be cut makes the rest."""
  job = train.prepare(
    config.override(config.Config(), {"data.name": "synthetic", "data.image_size": 32})
  )
  state = devices.Jit(job.steps, 1, fsdp=True).abstract(job.hypers)
  whole = on_one = 0
  for leaf in jax.tree.leaves(state):
    whole += np.prod(leaf.shape) * leaf.dtype.itemsize
    on_one += np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  assert jax.device_count() == 4
  assert 0.25 <= on_one / whole < 0.2575


def test_flax_is_imported_by_models_only():
  for file in (ROOT / "vit_jax").rglob("*.py"):
    # The benchmark holds what others do beside ours.
    if "models" in file.parts or "bench" in file.parts:
      continue
    for node in ast.walk(ast.parse(file.read_text())):
      names = [a.name for a in getattr(node, "names", [])]
      names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
      assert not any(n.split(".")[0] == "flax" for n in names), file


@pytest.mark.parametrize("unwanted", ["torch", "tensorflow", "matplotlib"])
def test_core_import_is_light(unwanted):
  code = (
    "import sys, vit_jax.train, vit_jax.evaluate; "
    f"sys.exit({unwanted!r} in sys.modules)"
  )
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0

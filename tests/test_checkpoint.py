"""What is kept, what counts as whole, and what is refused."""

import hashlib
import json
import logging
import math
import pathlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import vit_jax
from vit_jax import checkpoint, config, train
from vit_jax.checkpoint import Damaged, Keep, Saver
from vit_jax.config import ConfigError


def state(step, width=5):
  draw = np.random.default_rng(step)
  return {
    "step": jnp.int32(step),
    "params": {
      "kernel": jnp.asarray(draw.normal(size=(1, width, 3)), jnp.float32),
      "bias": jnp.asarray(draw.normal(size=(1, 3)), jnp.bfloat16),
    },
    "seen": jnp.asarray(draw.random((4,)) < 0.5),
  }


def meta(**metrics):
  return {"metrics": metrics, "running": {"totals": {"loss": [0.5]}, "count": 3}}


def saved(folder, keep, scores):
  """Saves a step for each {step: metrics}; returns the steps that stayed."""
  saver = Saver(folder, keep)
  for step, metrics in scores.items():
    saver.save(step, state(step), meta(**metrics))
  saver.close()
  return checkpoint.steps(folder)


def same(one, other):
  one, other = checkpoint.flatten(one), checkpoint.flatten(other)
  assert one.keys() == other.keys()
  for name in one:
    assert one[name].dtype == other[name].dtype, name
    np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]))


def digests(folder):
  return {
    str(p.relative_to(folder)): p.is_file()
    and hashlib.sha256(p.read_bytes()).hexdigest()
    for p in pathlib.Path(folder).rglob("*")
  }


# --------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
  "keep, stay",
  [
    (Keep(2), [10, 100]),
    (Keep(1), [100]),
    (Keep(None), [2, 9, 10, 100]),
    (Keep(9), [2, 9, 10, 100]),
    # The first step saved at or after 5, 10, ..., 100.
    (Keep(1, every=5), [9, 10, 100]),
    (Keep(1, every=8), [9, 100]),
    (Keep(1, every=11), [100]),
    (Keep(1, best="val/accuracy"), [9, 100]),
    (Keep(1, best="val/loss"), [2, 100]),
    (Keep(1, every=10, best="val/loss"), [2, 10, 100]),
    (Keep(1, best="val/missing"), [100]),
  ],
)
def test_steps_that_stay(tmp_path, keep, stay):
  metrics = {"val/accuracy": {2: 0.1, 9: 0.9, 10: 0.9, 100: 0.5}}
  metrics["val/loss"] = {2: 0.1, 9: 0.2, 10: None, 100: 0.1}
  scores = {n: {m: v[n] for m, v in metrics.items()} for n in (2, 9, 10, 100)}
  assert saved(tmp_path, keep, scores) == stay


def test_latest_and_best_stay_apart_when_the_metric_falls(tmp_path):
  scores = {step: {"val/accuracy": 1 - step / 10} for step in range(1, 7)}
  assert saved(tmp_path, Keep(2, best="val/accuracy"), scores) == [1, 5, 6]
  step, found, _ = checkpoint.newest_whole(tmp_path, state(0))
  assert step == 6
  same(found, state(6))
  # A saver that opens the folder anew knows the scores.
  saver = Saver(tmp_path, Keep(2, best="val/accuracy"))
  assert not saver.beats_best({"val/accuracy": 0.9})
  assert saver.beats_best({"val/accuracy": 0.91})
  saver.save(7, state(7), meta(**{"val/accuracy": 0.2}))
  saver.close()
  assert checkpoint.steps(tmp_path) == [1, 6, 7]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_is_never_best(tmp_path, value):
  for name in ("val/accuracy", "val/loss"):
    saver = Saver(tmp_path, Keep(best=name))
    assert not saver.beats_best({name: value})
    assert saver.beats_best({name: 1e30})
    saver.close()
  assert checkpoint.best_step({1: -math.inf, 2: 0.5, 3: 0.5, 4: -math.inf}) == 2
  assert checkpoint.best_step({1: -math.inf}) is None


def test_a_step_is_never_written_twice(tmp_path):
  saved(tmp_path, Keep(), {3: {}})
  before = digests(tmp_path)
  saver = Saver(tmp_path, Keep())
  with pytest.raises(FileExistsError, match="never written twice"):
    saver.save(3, state(4), meta())
  saver.close()
  assert digests(tmp_path) == before


def test_what_is_no_step_is_left_alone(tmp_path):
  saved(tmp_path, Keep(), {3: {}})
  folder = tmp_path / "checkpoints"
  for name in ("9.orbax-checkpoint-tmp", "9.damaged-0", "007", "²", "best", "-4"):
    (folder / name).mkdir()
  assert checkpoint.steps(tmp_path) == [3]
  # What a killed save has left is in nobody's way.
  assert saved(tmp_path, Keep(1), {9: {}}) == [9]
  assert (folder / "007").exists() and (folder / "9.damaged-0").exists()


# --------------------------------------------------------------------------- damage


def truncate(content):
  return content[: len(content) // 2]


def flip(content):
  place = len(content) * 2 // 3
  return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGES = {
  "truncated": truncate,
  "emptied": lambda content: b"",  # noqa: ARG005
  "zeroed": lambda content: bytes(len(content)),
  "flipped": flip,
  "missing": None,
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
  folder = tmp_path_factory.mktemp("two")
  saved(folder, Keep(), {2: {"val/loss": 0.25}, 10: {"val/loss": 0.125}})
  return folder


# Orbax leaves tasks behind where one of many arrays cannot be read.
torn = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@torn
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_and_the_step_before_is_used(
  two_steps, tmp_path, damage, caplog
):
  """Whatever file is hit: the state comes back exactly, or the one before does."""
  newest = two_steps / "checkpoints" / "10"
  files = sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file())
  used = []
  for number, name in enumerate(files):
    folder = tmp_path / str(number)
    shutil.copytree(two_steps, folder)
    target = folder / "checkpoints" / "10" / name
    if DAMAGES[damage] is None:
      target.unlink()
    elif not target.stat().st_size:
      continue
    else:
      target.write_bytes(DAMAGES[damage](target.read_bytes()))
    before = digests(folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      step, found, read = checkpoint.newest_whole(folder, state(0))
    same(found, state(step))
    assert read["metrics"] == {"val/loss": 0.25 if step == 2 else 0.125}
    # asyncio reports the tasks that Orbax leaves behind, sooner or later.
    ours = [r.message for r in caplog.records if r.name != "asyncio"]
    warned = [message for message in ours if "checkpoints/10" in message]
    assert bool(warned) == (step == 2), name
    assert digests(folder) == before, name
    used.append(step)
  assert used.count(2) >= 2


def test_an_empty_folder_is_no_checkpoint(two_steps, tmp_path, caplog):
  folder = tmp_path / "run"
  shutil.copytree(two_steps, folder)
  (folder / "checkpoints" / "11").mkdir()
  (folder / "checkpoints" / "12").write_text("a file")
  with pytest.raises(Damaged, match="11 is not a whole checkpoint"):
    checkpoint.read_meta(folder / "checkpoints" / "11")
  assert checkpoint.newest_whole(folder, state(0))[0] == 10
  assert all(f"checkpoints/{n}" in caplog.text for n in (11, 12))
  # What lies above the step that a run goes on from is set aside, nothing deleted.
  renamed = checkpoint.set_aside(folder, 10)
  assert [pathlib.Path(name).name for name in renamed] == [
    "11.damaged-0",
    "12.damaged-0",
  ]
  (folder / "checkpoints" / "11").mkdir()
  assert checkpoint.set_aside(folder, 10)[0].endswith("11.damaged-1")
  assert checkpoint.steps(folder) == [2, 10]
  assert checkpoint.set_aside(folder, 10) == []


def test_changed_meta_data_is_damage(two_steps, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(two_steps, folder)
  (path,) = [p for p in (folder / "checkpoints" / "10" / "meta").glob("metadata")]
  content = json.loads(path.read_text())
  for change in ({"metrics": {"val/loss": 0.0}}, {"tree": {}}, {"schema": 2}):
    path.write_text(json.dumps(content | change))
    with pytest.raises(Damaged, match="checkpoints/10"):
      checkpoint.read_meta(folder / "checkpoints" / "10")


def test_values_of_another_step_are_damage(two_steps, tmp_path):
  """Files that are whole in themselves: only the checksums tell."""
  folder = tmp_path / "run"
  shutil.copytree(two_steps, folder)
  for name in ("2", "10"):
    shutil.rmtree(folder / "checkpoints" / name / "arrays")
  for name, other in (("2", "10"), ("10", "2")):
    shutil.copytree(
      two_steps / "checkpoints" / other / "arrays",
      folder / "checkpoints" / name / "arrays",
    )
  with pytest.raises(Damaged, match="10: the values of .* are not those"):
    checkpoint.restore(folder / "checkpoints" / "10", state(0))
  assert checkpoint.newest_whole(folder, state(0)) is None


@pytest.mark.parametrize(
  "error", [MemoryError(), PermissionError("no"), RuntimeError("RESOURCE_EXHAUSTED: x")]
)
def test_want_of_memory_is_no_damage(two_steps, monkeypatch, error):
  """The step before is not taken in place of one that may be whole."""

  def fail(*_, **__):
    raise error

  monkeypatch.setattr(checkpoint, "_restored", fail)
  with pytest.raises(type(error)):
    checkpoint.newest_whole(two_steps, state(0))


def test_no_step_at_all(tmp_path):
  assert checkpoint.newest_whole(tmp_path, state(0)) is None
  assert checkpoint.steps(tmp_path / "missing") == []


def test_a_copy_is_as_good(two_steps, tmp_path):
  shutil.copytree(two_steps, tmp_path / "copy of it")
  before = digests(two_steps)
  step, found, _ = checkpoint.newest_whole(tmp_path / "copy of it", state(0))
  assert step == 10
  same(found, state(10))
  assert digests(two_steps) == before


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda s: s | {"extra": jnp.zeros(2)}, ["missing extra"]),
    (lambda s: {k: v for k, v in s.items() if k != "seen"}, ["extra seen"]),
    (lambda s: s | {"seen": jnp.zeros(5, bool)}, ["seen is (4,), expected (5,)"]),
    (lambda s: s | {"step": jnp.float32(0)}, ["step is int32, expected float32"]),
    (
      lambda s: (
        s | {"params": {**s["params"], "bias": s["params"]["bias"].astype(jnp.float32)}}
      ),
      ["params/bias is bfloat16, expected float32"],
    ),
    (
      lambda s: state(0, width=6) | {"other": jnp.zeros(1)},  # noqa: ARG005
      ["missing other", "params/kernel is (1, 5, 3), expected (1, 6, 3)"],
    ),
  ],
)
def test_another_state_is_refused_with_names(two_steps, change, words):
  with pytest.raises(ConfigError, match="does not fit this run") as caught:
    checkpoint.newest_whole(two_steps, change(state(0)))
  for word in words:
    assert word in str(caught.value)
  assert "\n" not in str(caught.value)


def test_long_lists_of_differences_are_cut(two_steps):
  template = state(0) | {f"new_{i}": jnp.zeros(1) for i in range(20)}
  with pytest.raises(ConfigError, match="and 12 more"):
    checkpoint.newest_whole(two_steps, template)


# --------------------------------------------------------------- errors of saving


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
  (tmp_path / "checkpoints").write_text("a file")
  with pytest.raises(OSError):
    saver = Saver(tmp_path, Keep())
    saver.save(1, state(1), meta())
    saver.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_an_error(tmp_path):
  """The save runs in the background; its error must not stay there."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  saver = Saver(tmp_path, Keep(1))
  saver.save(1, {"small": jnp.zeros(3)}, meta())
  saver.wait()
  noise = np.random.default_rng(0).normal(size=(1 << 20,)).astype(np.float32)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    with pytest.raises(Exception, match=r"."):
      saver.save(2, {"small": jnp.asarray(noise)}, meta())
      saver.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  # The old step was not dropped for one that never came to be.
  step, _, _ = checkpoint.newest_whole(tmp_path, {"small": jnp.zeros(3)})
  assert step == 1


# ------------------------------------------------------------------------ checksums


def mesh():
  return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def test_checksums_do_not_depend_on_devices():
  draw = np.random.default_rng(0)
  arrays = {
    "float32": draw.normal(size=(8, 12)).astype(np.float32),
    "bfloat16": jnp.asarray(draw.normal(size=(4, 3, 8)), jnp.bfloat16),
    "int32": draw.integers(-(2**31), 2**31, (16,)).astype(np.int32),
    "int8": draw.integers(-128, 128, (4, 4)).astype(np.int8),
    "bool": draw.random((8, 3)) < 0.5,
  }
  on_one = checkpoint.checksums(jax.device_put(arrays, jax.devices()[0]))
  for spec in (P("data"), P()):
    spread = jax.device_put(arrays, NamedSharding(mesh(), spec))
    found = checkpoint.checksums(spread)
    assert {n: int(v) for n, v in found.items()} == {
      n: int(v) for n, v in on_one.items()
    }
  last = {n: arrays[n] for n in ("float32", "bfloat16")}
  specs = {"float32": P(None, "data"), "bfloat16": P(None, None, "data")}
  placed = {
    n: jax.device_put(x, NamedSharding(mesh(), specs[n])) for n, x in last.items()
  }
  for name, value in checkpoint.checksums(placed).items():
    assert int(value) == int(on_one[name])


@pytest.mark.parametrize(
  "dtype",
  ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool"],
)
def test_checksums_see_every_change(dtype):
  draw = np.random.default_rng(1)
  if dtype == "bool":
    base = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
  else:
    base = np.asarray(jnp.asarray(draw.normal(size=(3, 4)) * 50, dtype))
  variants = [base, base[::-1], base[:, ::-1], base[:, [1, 0, 2, 3]], base[[0, 2, 1]]]
  for bit in range(8 * base.dtype.itemsize if dtype != "bool" else 1):
    raw = bytearray(base.tobytes())
    raw[5 * base.dtype.itemsize + bit // 8] ^= 1 << bit % 8
    variants.append(np.frombuffer(bytes(raw), base.dtype).reshape(base.shape))
  variants.append(np.zeros_like(base))
  sums = checkpoint.checksums(dict(enumerate(variants)))
  assert len({int(v) for v in sums.values()}) == len(variants)


def test_checksums_of_empty_and_single_values():
  sums = checkpoint.checksums(
    {
      "empty": jnp.zeros((0, 3)),
      "one": jnp.float32(1),
      "minus": jnp.float32(-1),
      "zero": jnp.float32(0),
      "minus zero": jnp.float32(-0.0),
    }
  )
  sums = {n: int(v) for n, v in sums.items()}
  assert sums.pop("empty") == 0
  assert len(set(sums.values())) == 4


# ------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run of 6 steps that saves and evaluates every 2."""
  folder = tmp_path_factory.mktemp("tiny") / "a run"
  settings = tiny.make(
    model__depth=1,
    data__val=0.25,
    optim__ema=0.5,
    train__length="6 steps",
    train__steps_per_call=2,
    train__eval_every="2 steps",
    train__checkpoint_every="2 steps",
    train__log_every="2 steps",
    train__keep=None,
    train__best_metric="val/loss",
  )
  train.run(settings, folder)
  return folder


def test_a_run_is_found_by_any_name_of_it(run, monkeypatch):
  monkeypatch.chdir(run.parent)
  monkeypatch.setenv("HOME", str(run.parent))
  step = run / "checkpoints" / "6"
  for name in (
    run,
    "a run",
    "./a run/",
    "~/a run",
    f"{run}/",
    run / "checkpoints",
    f"{run}/checkpoints/",
    step,
    f"{step}/",
    "a run/checkpoints/6",
  ):
    folder, path = checkpoint.find(name, "latest")
    assert str(folder) == str(run) and str(path) == str(step), name
  for number in (4, "4", "04"):
    assert checkpoint.find(run, number)[1].name == "4"
  # A step that is named by its folder is that step.
  assert checkpoint.find(run / "checkpoints" / "2", "latest")[1].name == "2"


@pytest.mark.parametrize("step", ["last", 5, -2, "-2", 2.5, "", "²", True])
def test_steps_that_are_not_there_are_refused(run, step):
  with pytest.raises(ConfigError, match="expected latest, best or one of 2, 4, 6"):
    checkpoint.find(run, step)


def test_what_is_no_run_is_refused(run, tmp_path):
  with pytest.raises(ConfigError, match="no config.json"):
    checkpoint.find(tmp_path / "nothing", "latest")
  with pytest.raises(ConfigError, match="no config.json"):
    checkpoint.find(run / "tensorboard", "latest")
  shutil.copy(run / "config.json", tmp_path)
  with pytest.raises(ConfigError, match="no checkpoints yet"):
    checkpoint.find(tmp_path, "latest")
  with pytest.raises(ConfigError, match="expected latest, best or one of"):
    checkpoint.find(run / "checkpoints" / "8", "latest")


def test_best_is_that_of_the_metric(run):
  losses = {
    n: checkpoint.read_meta(run / "checkpoints" / str(n))["metrics"]["val/loss"]
    for n in (2, 4, 6)
  }
  least = min(losses, key=losses.get)
  assert checkpoint.find(run, "best")[1].name == str(least)


def test_loading_gives_a_working_model_and_changes_nothing(run):
  before = digests(run)
  model, params, found = vit_jax.load(run)
  average = vit_jax.load(run, ema=True)[1]
  early = vit_jax.load(str(run), step=2)[1]
  logits = jax.jit(model.apply)({"params": params}, jnp.zeros((3, 8, 8, 3)))
  assert logits.shape == (3, 10) and np.isfinite(logits).all()
  assert found.model.width == 16
  assert not np.array_equal(params["head"]["kernel"], early["head"]["kernel"])
  assert not np.array_equal(params["head"]["kernel"], average["head"]["kernel"])
  assert digests(run) == before


def test_the_average_and_the_member_must_be_there(run, tmp_path):
  with pytest.raises(ConfigError, match="member='7'"):
    vit_jax.load(run, member="7")
  with pytest.raises(ConfigError, match="member=-1"):
    vit_jax.load(run, member=-1)
  without = tmp_path / "run"
  shutil.copytree(run, without)
  content = json.loads((without / "config.json").read_text())
  content["config"]["optim"]["ema"] = None
  content["config"]["train"]["best_metric"] = None
  (without / "config.json").write_text(json.dumps(content))
  with pytest.raises(ConfigError, match="without optim.ema"):
    vit_jax.load(without, ema=True)
  with pytest.raises(ConfigError, match="without train.best_metric"):
    vit_jax.load(without, step="best")


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"model__depth": 2}, ["missing params/block_1/"]),
    (
      {"model__width": 32},
      ["params/block_0/attention/key/bias is (1, 2, 8), expected (1, 2, 16)"],
    ),
    ({"optim__ema": None}, ["extra ema/"]),
    ({"model__pool": "map"}, ["missing params/pool/", "more"]),
  ],
)
def test_a_model_of_another_form_is_refused(run, changes, words):
  other = tiny.make(**({"model__depth": 1, "optim__ema": 0.5} | changes))
  job = train.prepare(other)
  template = jax.eval_shape(jax.vmap(job.steps.init), job.hypers)
  with pytest.raises(ConfigError, match="does not fit this run") as caught:
    checkpoint.newest_whole(run, template)
  for word in words:
    assert word in str(caught.value)


def test_fewer_blocks_and_another_head_are_refused(run):
  job = train.prepare(tiny.make(model__depth=1, optim__ema=0.5))
  template = dict(jax.eval_shape(jax.vmap(job.steps.init), job.hypers))
  params = dict(template["params"])
  del params["block_0"]
  with pytest.raises(ConfigError, match="extra params/block_0/"):
    checkpoint.newest_whole(run, template | {"params": params})
  params = dict(template["params"])
  params["head"] = {
    "kernel": jax.ShapeDtypeStruct((1, 16, 3), jnp.float32),
    "bias": jax.ShapeDtypeStruct((1, 3), jnp.float32),
  }
  with pytest.raises(
    ConfigError, match=r"params/head/kernel is \(1, 16, 10\), expected \(1, 16, 3\)"
  ):
    checkpoint.newest_whole(run, template | {"params": params})


def hit_arrays(folder, step):
  """Changes the values of a step, not its meta data."""
  for path in (folder / "checkpoints" / str(step) / "arrays").rglob("d/*"):
    path.write_bytes(flip(path.read_bytes()))


@torn
def test_latest_is_the_newest_whole_step_for_loading_too(run, tmp_path, caplog):
  folder = tmp_path / "run"
  shutil.copytree(run, folder)
  hit_arrays(folder, 6)
  before = digests(folder)
  params, _, step = checkpoint.load_params(folder)
  assert step == 4 and "checkpoints/6" in caplog.text
  same(params, checkpoint.load_params(run, step=4)[0])
  # Who names a step gets it or an error.
  for name, number in ((folder, 6), (folder / "checkpoints" / "6", "latest")):
    with pytest.raises(ConfigError, match="checkpoints/6"):
      checkpoint.load_params(name, step=number)
  for step in (2, 4):
    hit_arrays(folder, step)
  with pytest.raises(ConfigError, match="checkpoints/"):
    checkpoint.load_params(folder)
  (folder / "checkpoints" / "9").mkdir()
  with pytest.raises(ConfigError, match="checkpoints/"):
    checkpoint.load_params(folder)
  shutil.rmtree(folder / "checkpoints" / "9")
  assert digests(folder).keys() == before.keys()


def test_damaged_records_are_bad_input(run, tmp_path):
  for name in ("config.json", "members.json"):
    folder = tmp_path / name
    shutil.copytree(run, folder)
    whole = json.loads((folder / name).read_text())
    torn_off = [
      json.dumps({k: v for k, v in whole.items() if k != key})
      for key in whole
      if key != "geometry"  # of models that have one
    ]
    for text in (
      '{"schema": 1',
      '{"schema": 99}',
      '{"schema": 1}',
      "[]",
      "",
      *torn_off,
    ):
      (folder / name).write_text(text)
      with pytest.raises(ConfigError, match=name):
        vit_jax.load(folder)


def test_a_step_folder_is_that_step(run):
  (first, *_, last) = checkpoint.steps(run)
  step = run / "checkpoints" / str(first)
  assert checkpoint.find(step, "latest") == checkpoint.find(step, str(first))
  with pytest.raises(ConfigError, match=f"is one step, so step='{last}'"):
    checkpoint.find(step, str(last))


@torn
def test_training_goes_on_from_the_step_before(run, tmp_path, caplog):
  """What the promise of the last whole step is for: the run ends as the unbroken one."""
  folder = tmp_path / "run"
  shutil.copytree(run, folder)
  hit_arrays(folder, 6)
  settings = checkpoint.read_config(run)["config"]
  train.run(settings, folder)
  assert (folder / "checkpoints" / "6.damaged-0").exists()
  assert "6.damaged-0" in caplog.text
  for ema in (False, True):
    same(
      checkpoint.load_params(folder, step=6, ema=ema)[0],
      checkpoint.load_params(run, step=6, ema=ema)[0],
    )


def test_config_of_a_run_is_complete(run):
  content = json.loads((run / "config.json").read_text())
  assert config.parse(content["config"]) == checkpoint.read_config(run)["config"]
  for group, values in config.to_dict(config.Config()).items():
    if isinstance(values, dict):
      assert content["config"][group].keys() == values.keys()

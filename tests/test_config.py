"""What a setting may be, how it is written, and what is refused before JAX starts."""

import ast
import dataclasses
import importlib.util
import json
import math
import pathlib
import re
import subprocess
import sys
import tokenize

import hypothesis
import ml_collections
import numpy as np
import pytest
from hypothesis import strategies as st

from vit_jax import config
from vit_jax.config import Config, ConfigError, Duration, Pair

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
GROUPS = ("model", "data", "augment", "optim", "loss", "init", "train")


def changed(name, value):
  """Returns the setting after it was written into a ConfigDict and parsed."""
  made = config.default()
  made.update_from_flattened_dict({name: value})
  return config.value(config.parse(made), name)


def refused(changes, *words):
  with pytest.raises(ConfigError) as caught:
    config.override(Config(), changes)
  text = str(caught.value)
  assert "\n" not in text
  for word in words:
    assert word in text, text
  return text


# ------------------------------------------------------------------ single values


@pytest.mark.parametrize("name", ["model.patch", "model.stride", "model.pad"])
@pytest.mark.parametrize(
  "value, expected",
  [
    (8, (8, 8)),
    ((8, 8), (8, 8)),
    ([8, 8], (8, 8)),
    ((8, 12), (8, 12)),
    (8.0, (8, 8)),
    ("8", (8, 8)),
    (np.int64(8), (8, 8)),
    (Pair(8, 12), (8, 12)),
  ],
)
def test_pair_is_height_and_width(name, value, expected):
  found = changed(name, value)
  assert tuple(found) == expected
  assert all(type(side) is int for side in found)


@pytest.mark.parametrize(
  "value",
  [(8,), (8, 8, 8), ("a",), "a", 8.5, True, (8, None), (8, 8.5), (), {}, math.nan],
)
def test_pair_refuses_all_else(value):
  with pytest.raises(ConfigError, match=r"model\.patch=.*height, width"):
    changed("model.patch", value)


def test_pad_may_be_same_and_stride_none():
  assert changed("model.pad", "same") == "same"
  assert changed("model.stride", None) is None
  with pytest.raises(ConfigError, match="did you mean 'same'"):
    changed("model.pad", "sam")
  with pytest.raises(ConfigError, match="model.patch=None"):
    changed("model.patch", None)


@pytest.mark.parametrize("value", [1000, 1e3, "1e3", "1000", np.int32(1000)])
def test_integer(value):
  found = changed("data.batch_size", value)
  assert found == 1000 and type(found) is int


@pytest.mark.parametrize(
  "value", [2.5, "two", True, None, [8], math.inf, math.nan, "1e400", np.True_, 1 + 0j]
)
def test_no_integer(value):
  with pytest.raises(ConfigError, match=r"data\.batch_size=.*expected an integer"):
    changed("data.batch_size", value)


@pytest.mark.parametrize("value", [2**53 + 1, str(2**53 + 1), 10**30 + 1])
def test_a_large_seed_stays_exact(value):
  assert changed("seed", value) == int(value)


@pytest.mark.parametrize("value", [0.25, "0.25", "25e-2", np.float32(0.25)])
def test_number(value):
  found = changed("optim.lr", value)
  assert found == 0.25 and type(found) is float
  assert type(changed("optim.lr", 1)) is float


@pytest.mark.parametrize(
  "value", ["fast", True, None, [1.0], math.nan, math.inf, "nan", "inf", 10**400]
)
@pytest.mark.parametrize("name", ["optim.lr", "model.mlp_ratio"])
def test_no_number(name, value):
  with pytest.raises(ConfigError, match=f"{name}=.*expected a number"):
    changed(name, value)


@pytest.mark.parametrize("value", ["nan", math.inf, "rsqr"])
def test_scale_is_finite_or_named(value):
  with pytest.raises(ConfigError, match="model.scale=.*'rsqrt'"):
    changed("model.scale", value)


@pytest.mark.parametrize("value", [True, "true"])
def test_bool(value):
  assert changed("model.qk_norm", value) is True


@pytest.mark.parametrize("value", [1, 0, "yes", None, 1.0])
def test_no_bool(value):
  with pytest.raises(ConfigError, match="model.qk_norm=.*True or False"):
    changed("model.qk_norm", value)


@pytest.mark.parametrize(
  "name",
  [
    "model.stride",
    "model.layer_scale",
    "data.dir",
    "data.image_size",
    "augment.randaugment",
    "optim.clip_norm",
    "optim.ema",
    "optim.layer_decay",
    "optim.freeze",
    "init.source",
    "train.keep",
    "train.keep_every",
    "train.best_metric",
    "train.members_at_once",
  ],
)
def test_optional_settings_take_none(name):
  assert changed(name, None) is None


def test_no_other_setting_takes_none():
  hints = {
    f"{group}.{n}": h
    for group in GROUPS
    for n, h in type(getattr(Config(), group)).__annotations__.items()
  }
  for name, hint in hints.items():
    if "None" not in str(hint):
      with pytest.raises(ConfigError):
        changed(name, None)


@pytest.mark.parametrize(
  "value, expected",
  [
    ("30 epochs", (30, "epochs")),
    ("1 epoch", (1, "epochs")),
    ("500 steps", (500, "steps")),
    ("1 step", (1, "steps")),
    ("1e5 examples", (1e5, "examples")),
    ("100000 examples", (1e5, "examples")),
    ("5 %", (5, "%")),
    ("5%", (5, "%")),
    ("30epochs", (30, "epochs")),
    (" 2.5  epochs ", (2.5, "epochs")),
    (".5 %", (0.5, "%")),
    ("1.e+2 steps", (100, "steps")),
    (Duration(3, "steps"), (3, "steps")),
  ],
)
def test_duration(value, expected):
  found = changed("train.length", value)
  assert (found.amount, found.unit) == expected


@pytest.mark.parametrize(
  "value",
  [
    30,
    30.0,
    "30",
    "epochs",
    "epochs 30",
    "thirty epochs",
    "-1 epochs",
    "1 fortnight",
    "1 EPOCH",
    "nan steps",
    "inf steps",
    "1e999 steps",
    "2.5 steps",
    "0.5 examples",
    "1 epoch 2 steps",
    "1,5 epochs",
    "",
    None,
    True,
    ("30 epochs",),
    Duration(-3, "steps"),
    Duration(3, "fortnights"),
    Duration(math.nan, "epochs"),
  ],
)
def test_no_duration(value):
  with pytest.raises(ConfigError, match='train.length=.*"30 epochs", "500 steps"'):
    changed("train.length", value)


@pytest.mark.parametrize("amount", [1234567, 0.1 + 0.2, 1e22, 1e-7, 123456.789, 5])
def test_duration_is_written_exactly(amount):
  duration = Duration(amount, "epochs")
  assert config.override(Config(), {"train.length": str(duration)}).train.length == (
    duration
  )


@pytest.mark.parametrize(
  "text, kwargs, expected",
  [
    ("7 steps", {}, 7),
    ("0 steps", {}, 0),
    ("2 epochs", {}, 20),  # 200 / 10
    ("1 epoch", dict(examples=101), 11),  # the last example is seen
    ("1 epoch", dict(examples=9), 1),
    ("0.5 epochs", dict(examples=25), 2),
    ("2.2 epochs", dict(batch_size=10), 22),  # 2.2 * 100 > 220 in floating point
    ("1.1 epochs", dict(examples=10, batch_size=1), 11),
    ("100 examples", {}, 10),
    ("101 examples", {}, 11),
    ("1e5 examples", {}, 10000),
    ("5 %", {}, 50),
    ("0.04 %", {}, 0),
    ("0.06 %", {}, 1),
    ("100 %", {}, 1000),
  ],
)
def test_steps(text, kwargs, expected):
  duration = config.override(Config(), {"optim.warmup": text}).optim.warmup
  sizes = dict(examples=100, batch_size=10, total=1000) | kwargs
  found = config.steps(duration, **sizes)
  assert found == expected and type(found) is int


def test_a_run_cannot_be_a_share_of_itself():
  with pytest.raises(ConfigError, match="train.length='5 %'.*30 epochs"):
    config.steps(Duration(5, "%"), examples=10, batch_size=2, total=None)


# --------------------------------------------------------------- tuples and names


@pytest.mark.parametrize(
  "name, value, expected",
  [
    ("augment.crop", 4, 4),
    ("augment.crop", (0.2, 1), (0.2, 1.0)),
    ("augment.crop", [0.2, 1.0], (0.2, 1.0)),
    ("augment.randaugment", [2, 9], (2, 9.0)),
    ("optim.multipliers", [["head", 10]], (("head", 10.0),)),
    ("optim.multipliers", (), ()),
    ("optim.multipliers", (("a", 1), ("b", 0.5)), (("a", 1.0), ("b", 0.5))),
  ],
)
def test_tuples(name, value, expected):
  assert changed(name, value) == expected


@pytest.mark.parametrize(
  "name, value",
  [
    ("augment.crop", 2.5),
    ("augment.crop", (0.2,)),
    ("augment.crop", (0.2, 0.5, 1)),
    ("augment.crop", True),
    ("augment.randaugment", 2),
    ("augment.randaugment", (2.5, 9)),
    ("augment.randaugment", (2, "strong")),
    ("optim.multipliers", ("head", 10)),
    ("optim.multipliers", (("head",),)),
    ("optim.multipliers", ((10, "head"),)),
    ("optim.multipliers", "head"),
    ("optim.multipliers", {"head": 10}),
    ("data.name", 7),
    ("data.dir", 7),
    ("optim.freeze", 7),
    ("model.mlp", 1),
    ("model.mlp", ("gelu",)),
    ("model.mlp", None),
    ("model", 3),
    ("model", None),
    ("model.patch", ml_collections.ConfigDict({"height": 8})),
  ],
)
def test_wrong_types_are_named(name, value):
  nested = {}
  *path, leaf = name.split(".")
  inner = nested
  for part in path:
    inner = inner.setdefault(part, {})
  inner[leaf] = value
  with pytest.raises(ConfigError, match=f"^{re.escape(name)}="):
    config.parse(nested)


@pytest.mark.parametrize(
  "nested, expected",
  [
    ({"lerning_rate": 1}, "unknown setting 'lerning_rate'"),
    ({"optin": {}}, "unknown setting 'optin'; did you mean 'optim'?"),
    ({"model": {"drpout": 0.1}}, "'model.drpout'; did you mean 'dropout'?"),
    ({"train": {"lenght": "1 epoch"}}, "'train.lenght'; did you mean 'length'?"),
    ({"optim": {"zzz": 1}}, "'optim.zzz'; known: name, lr,"),
    ({3: 1}, "unknown setting '3'"),
  ],
)
def test_unknown_names_are_refused_with_the_nearest(nested, expected):
  with pytest.raises(ConfigError, match=re.escape(expected)):
    config.parse(nested)


@pytest.mark.parametrize(
  "name, value, near",
  [
    ("model.pool", "meen", "'mean'"),
    ("model.positions", "sincos", "'sincos"),
    ("model.dtype", "float23", "'float32'"),
    ("optim.name", "adam", "'adamw'"),
    ("optim.schedule", "cos", "'cosine'"),
    ("train.parallel", "pmpa", "'pmap'"),
    ("model.mlp", "GELU", "'gelu'"),
    ("data.unreadable", "skp", "'skip'"),
  ],
)
def test_enumerations_name_all_and_the_nearest(name, value, near):
  text = refused({name: value}, f"{name}={value!r}: expected '", near)
  for choice in re.findall(r"'\w+'", str(config_hint(name))):
    assert choice in text


def config_hint(name):
  group, leaf = name.split(".")
  return type(getattr(Config(), group)).__annotations__[leaf]


# ------------------------------------------------------------------------ override


def test_override_changes_only_what_it_names():
  base = config.override(Config(), {"model.width": 64, "seed": 3})
  found = config.override(base, {"model.stride": 2, "train.length": "7 steps"})
  expected = dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, stride=Pair(2, 2)),
    train=dataclasses.replace(base.train, length=Duration(7, "steps")),
  )
  assert found == expected and base.model.stride is None
  hash(found)


def test_override_refuses_names_that_are_not_settings():
  refused({"model.drpout": 1}, "'model.drpout'", "'dropout'")
  refused({"modle.dropout": 1}, "'modle.dropout'", "'model.dropout'")
  refused({"dropout": 1}, "'dropout'")
  refused({"": 1}, "unknown setting")
  refused({"train.length.amount": 1}, "'train.length.amount'")
  refused({"model.patch.height": 1}, "'model.patch.height'")


def test_override_of_a_group_is_refused():
  # It would set what it does not name back to the defaults.
  base = config.override(Config(), {"model.width": 64})
  with pytest.raises(ConfigError, match="'model' is a group.*'model.patch'"):
    config.override(base, {"model": {"depth": 2}})


def test_plain_overrides_are_json():
  changes = {
    "optim.lr": np.float32(0.5),
    "seed": np.int64(3),
    "model.patch": (np.int32(8), 8),
    "train.length": Duration(3, "steps"),
    "model.qk_norm": True,
    "optim.freeze": None,
  }
  written = json.loads(json.dumps(config.plain(changes)))
  assert written["model.qk_norm"] is True and type(written["seed"]) is int
  assert config.override(Config(), written) == config.override(Config(), changes)


# ------------------------------------------------------------------------ round trip


def from_file(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_are_read_back_from_json(path):
  parsed = config.parse(from_file(path))
  written = json.loads(json.dumps(config.to_dict(parsed), allow_nan=False))
  assert config.parse(written) == parsed
  assert parsed != Config()


DURATIONS = st.builds(
  lambda amount, unit: f"{amount!r} {unit}",
  st.one_of(st.integers(1, 10**12), st.floats(1e-9, 1e12)),
  st.sampled_from(["epochs", "%"]),
) | st.builds("{} steps".format, st.integers(1, 10**12))
NUMBERS = st.floats(0, 1e300, allow_subnormal=False)
SIDE = st.integers(1, 99)
CHANGES = st.fixed_dictionaries(
  {},
  optional={
    "model.patch": SIDE | st.tuples(SIDE, SIDE),
    "model.stride": st.none() | SIDE,
    "model.pad": st.just("same") | st.tuples(SIDE, SIDE),
    "model.scale": st.floats(-9, 9) | st.sampled_from(["rsqrt", "none"]),
    "model.layer_scale": st.none() | NUMBERS,
    "data.dir": st.none() | st.text(),
    "augment.crop": st.integers(0, 9) | st.just((0.25, 1.0)),
    "augment.randaugment": st.none() | st.tuples(SIDE, st.floats(0, 10)),
    "optim.lr": NUMBERS,
    "optim.warmup": DURATIONS,
    "optim.clip_norm": st.none() | NUMBERS,
    "optim.ema": st.none() | st.floats(0, 0.999999999),
    "optim.freeze": st.none() | st.sampled_from(["^block_[0-3]/", ".*", ""]),
    "optim.multipliers": st.lists(st.tuples(st.just("head|cls"), NUMBERS)),
    "train.length": DURATIONS,
    "train.keep": st.none() | SIDE,
    "train.keep_every": st.none() | DURATIONS,
    "seed": st.integers(0, 2**70),
  },
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(CHANGES)
def test_any_config_is_read_back_from_json(changes):
  made = config.override(Config(), changes)
  assert config.parse(json.loads(json.dumps(config.to_dict(made)))) == made
  assert config.parse(made) == made
  hash(made)
  for name, value in config.plain(changes).items():
    assert config.override(made, {name: value}) == made


def test_a_config_made_in_python_is_checked_as_well():
  odd = dataclasses.replace(Config().model, width=10, heads=3)
  with pytest.raises(ConfigError, match="model.heads=3"):
    config.parse(Config(model=odd))
  loose = dataclasses.replace(Config().model, patch=8, dropout=np.float32(0.5))
  assert config.parse(Config(model=loose)).model.patch == Pair(8, 8)
  wrong = dataclasses.replace(Config().model, pool="meen")
  with pytest.raises(ConfigError, match="did you mean 'mean'"):
    config.parse(Config(model=wrong))


def test_defaults_are_those_of_the_dataclasses():
  assert config.parse(config.default()) == Config() == config.parse({})
  assert config.parse({"model": {"width": 64}}).model.depth == Config().model.depth


def test_the_config_dict_is_locked():
  made = config.default()
  for target, name in ((made, "lerning_rate"), (made.model, "drpout")):
    with pytest.raises((AttributeError, KeyError)):
      setattr(target, name, 1)
  made.model.update(config.SIZES["S"])
  made.optim.ema = 0.99
  made.optim.ema = None
  made.model.stride = (2, 3)
  made.train.length = "3 steps"
  parsed = config.parse(made)
  assert parsed.model.width == 384 and parsed.model.stride == Pair(2, 3)


def test_names_are_all_settings():
  names = config.names()
  assert len(names) == len(set(names))
  assert {"seed", "model.patch", "train.length", "optim.multipliers"} <= set(names)
  leaves = sum(len(dataclasses.fields(getattr(Config(), g))) for g in GROUPS) + 1
  assert len(names) == leaves
  for name in names:
    config.value(Config(), name)


@pytest.mark.parametrize("size", sorted(config.SIZES))
def test_named_sizes_are_valid(size):
  config.parse({"model": config.SIZES[size]})


def test_every_setting_is_read_somewhere():
  """A value that no code reads is the quietest fault of all."""
  sources = [
    path.read_text()
    for path in (ROOT / "vit_jax").rglob("*.py")
    if path.name != "config.py"
  ]
  text = "\n".join(sources)
  for name in config.names():
    leaf = name.split(".")[-1]
    assert re.search(rf"\.{leaf}\b", text), f"{name} is read nowhere"


def test_a_comment_explains_every_setting():
  path = ROOT / "vit_jax" / "config.py"
  source = path.read_text()
  with tokenize.open(path) as file:
    comments = {
      token.start[0]
      for token in tokenize.generate_tokens(file.readline)
      if token.type == tokenize.COMMENT
    }
  groups = {type(getattr(Config(), g)).__name__ for g in GROUPS}
  found = 0
  for node in ast.parse(source).body:
    if isinstance(node, ast.ClassDef) and node.name in groups:
      for field in node.body:
        if isinstance(field, ast.AnnAssign):
          found += 1
          assert field.lineno - 1 in comments, f"{node.name}.{field.target.id}"
  assert found == len(config.names()) - 1
  assert re.search(r"#[^\n]+\n  seed: int", source)


# ----------------------------------------------------------- ranges and combinations

AMOUNTS = ("train.length", "train.log_every", "train.checkpoint_every")


@pytest.mark.parametrize(
  "name",
  [
    "model.width",
    "model.depth",
    "model.heads",
    "model.mlp_ratio",
    "data.batch_size",
    "data.eval_batch_size",
    "optim.accumulate",
    "optim.epsilon",
    "train.steps_per_call",
    "train.members_at_once",
    *AMOUNTS,
    "train.keep_every",
  ],
)
def test_above_zero(name):
  duration = name in AMOUNTS or name == "train.keep_every"
  refused(
    {name: "0 steps" if duration else 0},
    f"{name}='0 steps'" if duration else f"{name}=0",
    "above 0",
  )
  if not duration:
    refused({name: -1}, f"{name}=-1", "above 0")


@pytest.mark.parametrize(
  "name",
  [
    "model.drop_path",
    "model.dropout",
    "loss.label_smoothing",
    "loss.mask_ratio",
    "optim.momentum",
    "optim.second_momentum",
    "optim.ema",
  ],
)
def test_from_zero_to_below_one(name):
  config.override(Config(), {name: 0})
  config.override(Config(), {name: 0.9999999})
  for value in (1, 1.5, -0.1):
    refused({name: value}, f"{name}={float(value)}", "from 0 to below 1")


def test_erasing_may_be_certain():
  config.override(Config(), {"augment.erasing": 1})
  refused({"augment.erasing": 1.1}, "augment.erasing=1.1", "from 0 to 1")


@pytest.mark.parametrize(
  "name",
  [
    "model.registers",
    "data.val",
    "optim.lr",
    "optim.weight_decay",
    "optim.clip_norm",
    "augment.mixup",
    "augment.cutmix",
    "augment.crop",
    "seed",
  ],
)
def test_not_negative(name):
  config.override(Config(), {name: 0})
  refused({name: -1}, f"{name}=-1", "must not be negative")


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"train.keep": 0}, ["train.keep=0", "None for all"]),
    ({"train.keep": -1}, ["train.keep=-1", "1 or more"]),
    ({"model.heads": 5}, ["model.heads=5", "model.width=128", "[1, 2, 4, 8, 16, 32"]),
    ({"optim.accumulate": 3}, ["optim.accumulate=3", "data.batch_size=128"]),
    ({"augment.randaugment": (0, 5)}, ["augment.randaugment=(0, 5.0)", "from 1"]),
    ({"augment.randaugment": (2, 11)}, ["magnitude from 0 to 10"]),
    ({"augment.randaugment": (2, -1)}, ["magnitude from 0 to 10"]),
    ({"augment.mixup": 0.2, "data.batch_size": 7}, ["data.batch_size=7", "even"]),
    ({"augment.cutmix": 1, "data.batch_size": 6, "optim.accumulate": 2}, ["even"]),
    ({"model.positions": "sincos2d", "model.width": 18, "model.heads": 1}, ["by 4"]),
    ({"model.positions": "sincos1d", "model.width": 9, "model.heads": 1}, ["by 2"]),
    ({"model.positions": "rope2d", "model.width": 24}, ["model.heads = 6"]),
    ({"augment.crop": (0, 1)}, ["augment.crop=(0.0, 1.0)", "0 < least"]),
    ({"augment.crop": (0.5, 0.2)}, ["augment.crop"]),
    ({"augment.crop": (0.5, 1.2)}, ["augment.crop"]),
    ({"train.fsdp": True, "train.parallel": "pmap"}, ["train.fsdp", '"jit"']),
    ({"train.best_metric": "test/accuracy"}, ["never on test", '"val/accuracy"']),
    ({"train.best_metric": "accuracy"}, ['"val/accuracy"']),
    ({"train.best_metric": "val/acuracy"}, ["did you mean 'accuracy'"]),
    ({"train.best_metric": "val/accuracy", "loss.name": "mae"}, ["known: loss"]),
    ({"train.best_metric": "val_ema/loss"}, ["optim.ema"]),
    ({"optim.freeze": "("}, ["optim.freeze='('", "regular expression"]),
    ({"optim.multipliers": [("[", 1)]}, ["optim.multipliers='['"]),
  ],
)
def test_what_cannot_go_together(changes, words):
  refused(changes, *words)


@pytest.mark.parametrize(
  "changes",
  [
    {"train.best_metric": "val/top5"},
    {"train.best_metric": "val_ema/accuracy", "optim.ema": 0.9},
    {"train.best_metric": "val/loss", "loss.name": "mae"},
    {"augment.mixup": 0.2, "data.batch_size": 6},
    {"model.positions": "rope2d", "model.width": 16},
    {"optim.clip_norm": 0},
    {"train.eval_every": "0 steps"},
    {"optim.freeze": "^block_[01]/"},
  ],
)
def test_what_can_go_together(changes):
  config.override(Config(), changes)


# --------------------------------------------------------------------- command line

PARSE = """
import contextlib, io, json, sys, time
from absl import flags
from ml_collections import config_flags
from vit_jax import command, config

out = []
for arguments in json.loads(sys.argv[1]):
  sys.modules.pop("config_config", None)  # it would keep names of the file before
  fresh = flags.FlagValues()
  config_flags.DEFINE_config_file("config", None, flag_values=fresh)
  flags.FLAGS, sys.argv = fresh, ["train.py", *arguments]
  text, begin = io.StringIO(), time.perf_counter()
  with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
    try:
      left = command._parse(sys.argv)
      found = {"config": config.to_dict(command.parsed_config()), "left": left[1:]}
    except config.ConfigError as error:
      found = {"code": 2, "refused": str(error)}
    except SystemExit as error:
      found = {"code": error.code}
    except BaseException as error:
      found = {"code": "none", "refused": repr(error)}
  found["text"] = text.getvalue()
  out.append(found)
assert "jax" not in sys.modules and "tensorflow" not in sys.modules
print(json.dumps(out))
"""

# Arguments after --config=FILE; the settings that they give.
TAKEN = [
  (["--config.model.patch=8"], {"model.patch": 8}),
  (["--config.model.patch=(8,8)"], {"model.patch": 8}),
  (["--config.model.patch=[8,8]"], {"model.patch": 8}),
  (["--config.model.patch=(8, 12)"], {"model.patch": (8, 12)}),
  (["--config.train.length=3 epochs"], {"train.length": "3 epochs"}),
  (["--config.optim.warmup=5%"], {"optim.warmup": "5 %"}),
  (["--config.optim.ema=None"], {"optim.ema": None}),
  (["--config.optim.ema=.9"], {"optim.ema": 0.9}),
  (["--config.optim.lr=1e-4"], {"optim.lr": 1e-4}),
  (["--config.model.scale=none"], {"model.scale": "none"}),
  (["--config.model.scale=0.125"], {"model.scale": 0.125}),
  (["--config.model.pad=same"], {"model.pad": "same"}),
  (["--config.model.qk_norm=True"], {"model.qk_norm": True}),
  (["--config.model.qk_norm=true"], {"model.qk_norm": True}),
  (["--config.model.qk_norm"], {"model.qk_norm": True}),
  (["--noconfig.model.qk_norm"], {"model.qk_norm": False}),
  (["--config.optim.freeze=block_[01]/.*"], {"optim.freeze": "block_[01]/.*"}),
  (["--config.augment.crop=(0.2, 1)"], {"augment.crop": (0.2, 1)}),
  (["--config.optim.multipliers=(('head', 10),)"], {"optim.multipliers": (("head", 10),)}),
  (["--config.data.dir=/a b/c"], {"data.dir": "/a b/c"}),
  (["--config.seed=9007199254740993"], {"seed": 2**53 + 1}),
  (["--config.seed=1", "--config.seed=2"], {"seed": 2}),
  (["--config.data.batch_size=1e3"], {"data.batch_size": 1000}),
]  # fmt: skip

# Arguments and words of the refusal.
REFUSED = [
  (["--config.model.patch=(8,)"], ["model.patch=(8,)", "(height, width)"]),
  (["--config.model.patch=(8,8,8)"], ["model.patch=(8, 8, 8)"]),
  (["--config.model.patch=('a',)"], ["model.patch=('a',)"]),
  (["--config.model.patch="], ["model.patch=''"]),
  (["--config.model.patch.height=8"], ["'model.patch.height'"]),
  (["--config.lerning_rate=1"], ["'lerning_rate'"]),
  (["--config.optim.lerning_rate=1"], ["'optim.lerning_rate'"]),
  (["--config.model.drpout=.1"], ["did you mean 'model.dropout'"]),
  (["--noconfig.model.qk_nrm"], ["did you mean 'model.qk_norm'"]),
  (["--config.model.pool=meen"], ["did you mean 'mean'"]),
  (["--config.train.length=3"], ["train.length=3", '"30 epochs"']),
  (["--config.model.heads=5"], ["model.heads=5 does not divide"]),
  (["--config.model=3"], ["model"]),
  (["--config.model"], ["model"]),
  (["--config.optim.lr"], ["optim.lr=True"]),
  (["--konfig=3"], ["konfig"]),
]


def file_with(folder, name, body):
  path = folder / f"{name}.py"
  path.write_text(f"from vit_jax import config as config_lib\n{body}")
  return str(path)


def test_the_command_line(tmp_path):
  """One process for all: each costs seconds. None of it starts JAX."""
  base = str(ROOT / "configs" / "digits.py")
  flagfile = tmp_path / "flags.txt"
  flagfile.write_text(
    f"# three settings\n--config={base}\n--config.model.width=64\n"
    '--config.train.length="3 epochs"\n--config.optim.ema=None\n'
  )
  flagfile.write_text(flagfile.read_text().replace('"', ""))
  wrong = tmp_path / "wrong.txt"
  wrong.write_text("--config.model.widht=64\n")
  function = "def get_config():\n  c = config_lib.default()\n"
  bad = {
    "name": (
      f"{function}  c.model.drpout = 1\n  return c",
      "unknown setting 'drpout'; did you mean 'model.dropout'?",
    ),
    "top": (f"{function}  c.lerning_rate = 1\n  return c", "lerning_rate"),
    "type": (f"{function}  c.model.patch = (8,)\n  return c", "model.patch=(8,)"),
    "undefined": (f"{function}  c.model.patch = eight\n  return c", "NameError: name"),
    "zero": (f"{function}  c.model.patch = 1 // 0\n  return c", "ZeroDivisionError"),
    "value": (f"{function}  c.model.patch = int('a')\n  return c", "ValueError: inv"),
    "syntax": ("def get_config(:\n", "SyntaxError"),
    "import": ("import not_there\n", "not_there"),
    "nothing": (function, "--config"),
    "nofunction": ("x = 1\n", "get_config"),
    "foreign": ("def get_config():\n  return {'model': {}}\n", "--config"),
    "refused": (
      "def get_config():\n  config_lib.override(config_lib.Config(), {'a.b': 1})\n",
      "unknown setting 'a.b'",
    ),
  }
  files = {name: file_with(tmp_path, name, body) for name, (body, _) in bad.items()}
  lines = [[f"--config={base}", *arguments] for arguments, _ in TAKEN]
  lines += [["--config", base, "--config.model.width=64", "picture.png"]]
  lines += [[f"--flagfile={flagfile}"]]
  taken = len(lines)
  lines += [[f"--config={base}", *arguments] for arguments, _ in REFUSED]
  lines += [[f"--config={base}", f"--flagfile={wrong}"]]
  lines += [[f"--config={tmp_path}/none.py"], [], ["--config.model.patch=8"]]
  lines += [["--config="], [f"--config={tmp_path}"]]
  lines += [[f"--config={path}"] for path in files.values()]
  done = subprocess.run(
    [sys.executable, "-c", PARSE, json.dumps(lines)],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  assert done.returncode == 0, done.stderr
  found = [json.loads(text) for text in done.stdout.splitlines()][-1]
  plain = config.parse(from_file(ROOT / "configs" / "digits.py"))
  for (arguments, changes), result in zip(TAKEN, found):
    assert "config" in result, (arguments, result)
    expected = config.override(plain, changes)
    assert config.parse(result["config"]) == expected, arguments
  spaced, from_flagfile = found[taken - 2 : taken]
  assert spaced["config"]["model"]["width"] == 64
  assert spaced["left"] == ["picture.png"]
  expected = {"model.width": 64, "train.length": "3 epochs", "optim.ema": None}
  assert config.parse(from_flagfile["config"]) == config.override(plain, expected)
  words = [w for _, w in REFUSED] + [["did you mean 'model.width'"]]
  words += [["none.py: no such file"], ["--config is missing"], ["config"]]
  words += [["--config"], ["--config"]] + [[text] for _, text in bad.values()]
  assert len(words) == len(found) - taken
  for line, wanted, result in zip(lines[taken:], words, found[taken:]):
    assert result.get("code") == 2, (line, result)
    message = result.get("refused") or result["text"]
    assert len(message.strip().splitlines()) == 1, (line, message)
    assert "Traceback" not in message
    for word in wanted:
      assert word in message, (line, message)


def test_config_imports_no_jax():
  code = (
    "import sys, vit_jax, vit_jax.config, vit_jax.command;"
    "assert not {'jax', 'tensorflow', 'flax', 'orbax'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

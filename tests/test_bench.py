"""What the benchmark says must be true of what it measured."""

import json
import subprocess
import sys
import time

import jax
import pytest

from vit_jax.bench import (
  limits,
  model_steps,
  operators,
  peers,
  race,
  recipes,
  report,
  sizes,
)
from vit_jax.bench.race import Contender, Missing, Runner
from vit_jax.config import ConfigError
from vit_jax.models import cost

TINY = {
  "data.image_size": 8,
  "data.batch_size": 8,
  "model.patch": 4,
  "model.width": 16,
  "model.depth": 1,
  "model.heads": 2,
}


def sleeper(seconds):
  import time

  return Runner(lambda: time.sleep(seconds), {"parameters": 7})


def holder(size):
  """Holds so many bytes during a round, and no longer."""
  return Runner(lambda: len(b"1" * size), {})


def broken():
  raise ValueError("out of order")


def breaks_later():
  def go():
    raise ValueError("too hot")

  return Runner(go, {})


def test_a_contender_takes_the_time_of_a_round():
  contender = Contender(sleeper, 0.2, needs=("json",))
  assert contender.facts == {"parameters": 7}
  assert 0.2 <= contender.round() < 2
  contender.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_of_a_round():
  """256 MiB; between rounds nothing is held."""
  contender = Contender(holder, 2**28)
  contender.round()
  of_a_round, held = contender.memory()
  assert 250 < of_a_round < 300
  assert held < 100
  contender.close()


def test_peers_that_are_missing_or_fail_are_left_out(capsys):
  field = race.contenders(
    {
      "ours": lambda: Contender(sleeper, 0.0),
      "absent": lambda: Contender(sleeper, 0.0, needs=("no_such_module",)),
      "broken": lambda: Contender(broken),
      "late": lambda: Contender(breaks_later),
    },
    "ours",
  )
  assert list(field) == ["ours"]
  said = capsys.readouterr().err
  assert "absent is left out: No module named 'no_such_module'; try pip" in said
  assert "broken is left out: ValueError: out of order" in said
  assert "late is left out: ValueError: too hot" in said
  with pytest.raises(ConfigError, match="ours: ValueError: out of order"):
    race.contenders({"ours": lambda: Contender(broken)}, "ours")


def test_ratios_are_of_turns():
  """Theirs over ours, turn by turn: not the ratio of the medians."""
  assert race.ratios([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]) == [1.0, 2.0, 3.0]
  with pytest.raises(ValueError):
    race.ratios([1.0], [1.0, 2.0])
  assert race.spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("what", ["train", "eval"])
def test_a_race_of_steps(what):
  """The numbers of a row follow from the seconds of its rounds."""
  result = model_steps.run(
    what, size="reference", rounds=3, steps=2, changes=TINY, only=["plain Flax"]
  )
  ours, plain = result.rows
  assert (ours["contender"], plain["contender"]) == ("vit_jax", "plain Flax")
  assert ours["parameters"] == plain["parameters"]
  seconds = result.raw["seconds of each round"]
  assert ours["images/s"] == race.spread([16 / s for s in seconds["vit_jax"]])
  ratios = race.ratios(seconds["vit_jax"], seconds["plain Flax"])
  assert plain["we are x times as fast"] == race.spread(ratios)
  config, classes = sizes.make("reference", TINY)
  macs = sum(cost.macs(config.model, sizes.geometry(config), 3, classes).values())
  flops = 2 * macs * 8 * (3 if what == "train" else 1)
  assert result.notes["GFLOP of a step, our formulas"] == pytest.approx(flops / 1e9)
  # At this size the compiler's count holds much that is no product.
  assert result.notes["the compiler's count / ours"] > 1


@pytest.mark.parametrize("size", ["reference", "overlap"])
def test_formulas_are_the_compiler_s_count(size):
  """At the real sizes, of forward and backward pass: a few percent of a step are no
  products of matrices."""
  from vit_jax import train

  config, classes = sizes.make(size, {"data.batch_size": 2})
  job = train.prepare(config, data=model_steps._data(config, classes))
  batch = model_steps._batch(job.data.train, 2)
  for training in (True, False):
    ours = 2 * model_steps._flops_per_image(config, classes, training)
    counted = model_steps._counted(job, batch, training)
    assert 1 < counted / ours < 1.15


def test_sizes_are_those_of_the_table():
  tokens = {}
  for name in sizes.SIZES:
    config, _ = sizes.make(name)
    tokens[name] = cost.tokens(config.model, sizes.geometry(config))
  assert tokens == {"reference": 65, "overlap": 257, "vit_s16": 197, "vit_b16": 197}
  with pytest.raises(ConfigError, match="reference, overlap"):
    sizes.make("huge")
  with pytest.raises(ConfigError, match="did you mean"):
    sizes.make("reference", {"model.pach": 4})
  with pytest.raises(ConfigError, match="'timmy'; did you mean 'timm'"):
    model_steps.run(
      "train", size="reference", rounds=1, steps=1, changes={}, only=["timmy"]
    )


def test_a_plain_vit_has_our_parameters_and_makes_a_step():
  config, classes = sizes.make("overlap", TINY | {"model.patch": 4, "model.stride": 2})
  runner = peers.plain_flax(config, classes, 1, True)
  runner.go()
  parts = cost.parameters(config.model, sizes.geometry(config), 3, classes)
  assert runner.facts["parameters"] == sum(parts.values())


def test_peers_follow_sizes_only():
  peers.check({"model.width": 64, "data.batch_size": 4})
  with pytest.raises(Missing, match="cannot follow model.pool"):
    peers.check({"model.pool": "mean"})
  plain, _ = sizes.make("reference")
  assert peers._plain(plain)
  padded, _ = sizes.make("reference", {"model.pad": 2})
  assert not peers._plain(padded)


def test_an_operator_makes_a_round():
  for name in ("dense", "chunked"):
    runner = operators.ours(name, 2, 5)
    assert [leaf.shape for leaf in jax.tree.leaves(runner.go())] == [(2, 5, 4, 32)] * 3


def test_slopes_are_between_the_largest_two():
  def row(name, tokens, time, peak):
    figures = {"ms an image": (time, 0, 0), "peak MiB an image": peak}
    return {"operator": name, "tokens": tokens, **figures}

  rows = [row("a", 10, 99.0, 9), row("a", 100, 1.0, 1.0), row("a", 1000, 100.0, 10.0)]
  found = operators.slopes([*rows, row("b", 10, 1.0, None)])
  assert found == {"slope of a": "2.00 in time, 1.00 in memory"}


def test_a_limit_says_what_it_moved():
  assert limits._product("float32").facts["flops"] == 2 * 2048**3
  assert limits._copy().facts["bytes"] == 2 * 2**28


RESULT = report.Result(
  name="some",
  title="a | title",
  rows=[
    {"contender": "ours", "images/s": (1234.5, 1200.0, 1300.0), "peak": None},
    {"contender": "theirs", "images/s": (0.51234, 0.4, 0.6), "peak": 12},
  ],
  limits={"rate": 3.14159},
  notes={"settings": {"model.depth": 2}, "none": {}},
  raw={"seconds": {"ours": [1.0]}},
)


WRITES_ROWS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
with (folder / "metrics.jsonl").open("w") as file:
  for i in range(1000):
    time.sleep(0.1)
    row = {"step": i} | ({"test/accuracy": i / 100} if i % 2 else {})
    print(json.dumps(row), file=file, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="stops processes by signals")
def test_a_command_is_held_between_its_turns(tmp_path, monkeypatch):
  monkeypatch.setattr(recipes, "TURN", 0.7)
  command = recipes.Command(
    [sys.executable, "-c", WRITES_ROWS, str(tmp_path / "run")], tmp_path / "run"
  )
  held = 0.0
  while command.turn(0.15):
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    time.sleep(0.5)
    held += 0.5
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines
  assert held >= 1
  assert command.first(0.15) == command.seconds
  # Row 15 comes 1.6 s after the start of the loop; a pause of the loop may end while it
  # is held, the time that it was held is not counted.
  assert [accuracy for _, accuracy in command.reached] == [
    i / 100 for i in range(1, 16, 2)
  ]
  assert 1.0 <= command.seconds < 1.6 + 2
  assert command.reached[-1][0] == command.seconds
  assert command.reached[0][0] < command.reached[-1][0] - 0.5
  assert command.ended


def test_a_command_that_fails_says_why(tmp_path):
  command = recipes.Command(
    [sys.executable, "-c", "raise SystemExit('out of order')"], tmp_path
  )
  with pytest.raises(Missing, match="ended with 1: out of order"):
    while command.turn(1.0):
      pass


def test_files_of_a_result(tmp_path, capsys):
  files = report.write(RESULT, tmp_path / "new" / "folder")
  text = files[1].read_text()
  assert "| ours | 1,234 (1,200 to 1,300) | - |" in text
  assert "| theirs | 0.512 (0.400 to 0.600) | 12 |" in text
  assert "- rate: 3.14" in text
  assert "- settings: model.depth=2" in text
  assert "- none: none" in text
  assert text in capsys.readouterr().out
  content = json.loads(files[0].read_text())
  assert content["schema"] == report.SCHEMA
  assert content["rows"][0]["images/s"] == [1234.5, 1200.0, 1300.0]
  assert content["machine"]["packages"]["jax"] == jax.__version__
  assert report.write(RESULT, None) == []


def test_the_script_refuses_what_it_does_not_know():
  def said(*arguments):
    done = subprocess.run(
      [sys.executable, str(sizes.ROOT / "scripts" / "benchmark.py"), *arguments],
      capture_output=True,
      text=True,
    )
    assert done.returncode == 2
    return done.stderr

  assert said("trian") == "error: what to time: trian; did you mean 'train'?\n"
  assert "nothing: train, eval" in said()
  assert said("data", "--size=overlap").startswith("error: data does not read --size")
  assert "did you mean" in said("train", "--config.model.pach=5")
  assert "unseen" in said("train", "--config.model.patch=5")
  assert "--size" in said("train", "--size=huge")

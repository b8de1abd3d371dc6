"""Sweeps from the file to the report."""

import csv
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny

from vit_jax import checkpoint, config_files, records, train
from vit_jax.config import ConfigError
from vit_jax.data import datasets
from vit_jax.data.split import Dataset, Split
from vit_jax.sweep import launch, local, overview, report, results
from vit_jax.sweep.page import Link, Page
from vit_jax.sweep.space import arm, chain, grid, product

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = str(ROOT / "scripts" / "sweep.py")
FILE = """
import tiny
from vit_jax import config as config_lib
from vit_jax.sweep.space import arm, chain, grid, product
def get_config():
  return config_lib.to_dict(tiny.make(**{base}))
def get_sweep():
  return {space}
"""
AFFINITY = os.sched_getaffinity(0)
PROCESSORS = len(AFFINITY)
TOGETHER = f"--at_once={min(2, PROCESSORS)}"
ARMS = """product(
    chain(arm("small", {"model.width": 8}), arm("wide", {"model.width": 16})),
    grid("seed", [0, 1, 2]),
  )"""


def file(folder, space=ARMS, base="{}"):
  path = folder / "sweep_of_test.py"
  path.write_text(FILE.replace("{space}", space).replace("{base}", base))
  return path


def start(folder, *arguments):
  return subprocess.Popen(
    [sys.executable, SCRIPT, *map(str, arguments)],
    cwd=folder,
    env=os.environ
    | {
      "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
      "XLA_FLAGS": "",
      "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def ran(folder, *arguments):
  process = start(folder, *arguments)
  out, err = process.communicate(timeout=600)
  return process.returncode, out, err


def small_sweep(folder, **changes):
  """Runs two arms of three seeds here."""
  space = product(
    chain(arm("small", {"model.width": 8}), arm("wide", {"model.width": 16})),
    grid("seed", [0, 1, 2]),
  )
  groups = launch.make(folder, tiny.make(**changes), space)
  for group in groups:
    launch.run_group(folder, group.id)
  return groups


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  folder = tmp_path_factory.mktemp("sweep")
  return folder, small_sweep(folder)


def test_a_trial_is_what_a_run_alone_is(done, tmp_path):
  folder, groups = done
  assert [len(g.trials) for g in groups] == [3, 3]
  trial = groups[1].trials[2]
  assert trial.name == "wide,seed=2"
  alone = train.run(tiny.make(model__width=16, seed=2), tmp_path)["0"]
  (found,) = [o for o in results.read(folder) if o.trial.name == trial.name]
  for name in ("test/accuracy", "test/loss"):
    assert found.final(name) == alone[name]
  state = checkpoint.load_params(
    launch.run_folder(folder, groups[1].id), member="wide,seed=2"
  )[0]
  expected = checkpoint.load_params(tmp_path)[0]
  np.testing.assert_array_equal(state["head"]["kernel"], expected["head"]["kernel"])


def test_a_finished_group_keeps_its_last_checkpoint(done):
  folder, groups = done
  for group in groups:
    assert checkpoint.steps(launch.run_folder(folder, group.id)) == [10]


def test_status_and_plan_say_what_is_done(done):
  folder, groups = done
  text = overview.status(folder)
  assert text.startswith("trials: 6 done; 0.00 hours left, at the rate of the steps")
  assert "waiting" in overview.plan(None, groups)
  assert overview.plan(folder, groups).count("done") == 2


def test_the_report_repeats_the_metrics(done, tmp_path):
  folder, groups = done
  question = report.Question(by=("arm",), metric="test/loss")
  page = report.write(folder, question, tmp_path / "out").read_text()
  finals = {}
  for group in groups:
    for row in records.read(launch.run_folder(folder, group.id)):
      if "test/loss" in row:
        finals[group.trials[row["member"]].name] = row["test/loss"]
  for name in ("small", "wide"):
    values = [v for trial, v in finals.items() if trial.startswith(name)]
    assert len(values) == 3
    assert (
      f"| {name} | 3 | {np.mean(values):.4g} | {np.std(values, ddof=1):.4g} |" in page
    )
  assert "nothing can be claimed: 3 pairs" in page
  with (tmp_path / "out" / "trials.csv").open() as text:
    rows = list(csv.DictReader(text))
  assert {r["trial"]: float(r["test/loss"]) for r in rows} == finals
  assert {r["model.width"] for r in rows} == {"8", "16"}
  for group in groups:  # the links lead somewhere
    assert f"groups/{group.id})" in page
  html = (tmp_path / "out" / "report.html").read_text()
  assert html.count("<table>") == 2


def test_an_arm_is_judged_with_its_tuned_value(tmp_path):
  """The value is chosen by validation, the arms are compared by test."""
  base = tiny.make(data__val=0.25)
  space = product(
    chain(arm("small", {"model.width": 8}), arm("wide", {"model.width": 16})),
    grid("optim.lr", [1e-4, 1e-2, 3e-2]),
    grid("seed", [0, 1]),
  )
  for group in launch.make(tmp_path, base, space):
    launch.run_group(tmp_path, group.id)
  with (tmp_path / "trials.csv").open("w") as text:
    text.write(report._csv(results.read(tmp_path)))
  rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
  question = report.Question(
    by=("arm",), metric="test/loss", tune="optim.lr", tune_metric="val/loss"
  )
  page = report.write(tmp_path, question).read_text()
  for name in ("small", "wide"):
    means = {}
    for lr in ("0.0001", "0.01", "0.03"):
      part = [r for r in rows if r["arm"] == name and r["optim.lr"] == lr]
      means[lr] = [
        np.mean([float(r[m]) for r in part]) for m in ("val/loss", "test/loss")
      ]
    best = min(means, key=lambda lr: means[lr][0])
    end = "no" if best == "0.01" else "yes"
    val, test = means[best]
    assert f"| {name} | {best} | 0.0001, 0.01, 0.03 | {val:.4g} | {end} |" in page
    assert f"| {name} | 2 | {test:.4g} |" in page
  # The table of all trials is whole.
  assert len(list(csv.DictReader((tmp_path / "report" / "trials.csv").open()))) == 12
  with pytest.raises(ConfigError, match="--tune=arm is in --by"):
    report.write(tmp_path, dataclasses.replace(question, tune="arm"))
  with pytest.raises(ConfigError, match="--tune_metric=val/los; did you mean"):
    report.write(tmp_path, dataclasses.replace(question, tune_metric="val/los"))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"by": ("model.widht",)}, "no setting; did you mean 'model.width'"),
    ({"metric": "test/acuracy"}, "did you mean 'test/accuracy'"),
    ({"against": "huge"}, "expected one of small; wide"),
    ({"by": ("model.patch",)}, "are of one arm and have the same seed"),
  ],
)
def test_a_question_that_cannot_be_answered_is_refused(done, tmp_path, changes, words):
  with pytest.raises(ConfigError, match=words):
    report.write(done[0], report.Question(**{"by": ("arm",), **changes}), tmp_path)


def test_a_page_escapes_what_it_is_given():
  page = Page("<b>|")
  page.table(["`a`"], [["x|y<script>"], [Link("[t](u)", 'a b"(c)')]])
  page.figure('"><img', "<i>")
  html, markdown = page.html(), page.markdown()
  assert "<script>" not in html and "<b>" not in html and "<i>" not in html
  assert 'href="a b&quot;(c)"' in html
  assert "| x\\|y\\<script\\> |" in markdown
  assert '[\\[t\\](u)](a%20b"%28c%29)' in markdown


def test_formulas_stay_text_in_a_spreadsheet():
  assert report._safe("=1+1") == "'=1+1"
  assert report._safe("-0.5") == "-0.5" and report._safe(-0.5) == -0.5
  assert report._safe(None) == ""


def test_a_failing_group_does_not_stop_the_others(tmp_path):
  space = (
    'product(grid("optim.lr", [1e30]), grid("model.width", [8])) + grid("seed", [1])'
  )
  base = '{"optim__name": "sgd", "optim__clip_norm": None}'
  path = file(tmp_path, space, base)
  code, out, err = ran(tmp_path, f"--sweep={path}", "--workdir=runs")
  assert code == 1, err
  assert "Traceback" not in err
  assert "trials: 1 failed, 1 done" in out and "Diverged" in out
  states = {
    g.names[0]: launch.state(tmp_path / "runs", g)
    for g in launch.read(tmp_path / "runs")
  }
  failed = states["lr=1e+30,width=8"]
  assert failed["state"] == "failed" and "Traceback" in failed["message"]
  assert states["seed=1"]["state"] == "done"
  page = report.write(tmp_path / "runs", report.Question(by=("optim.lr",))).read_text()
  assert "| [lr=1e+30,width=8](../groups/" in page


@pytest.mark.skipif(sys.platform == "win32", reason="kills")
def test_a_killed_sweep_goes_on_as_unbroken(tmp_path):
  base = '{"train__length": "200 steps", "train__checkpoint_every": "20 steps"}'
  path = file(tmp_path, base=base)
  process = start(tmp_path, f"--sweep={path}", "--workdir=killed")
  groups = tmp_path / "killed" / "groups"
  deadline = time.monotonic() + 300
  while not list(groups.glob("*/checkpoints/40")):
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.02)
  (place,) = groups.iterdir()
  status = json.loads((place / "status.json").read_text())
  os.kill(process.pid, signal.SIGKILL)
  os.kill(status["pid"], signal.SIGKILL)
  process.communicate()
  text = overview.status(tmp_path / "killed")
  assert "3 killed" in text and "3 waiting" in text
  code, out, err = ran(tmp_path, f"--sweep={path}", "--workdir=killed")
  assert code == 0, err
  assert "trials: 6 done" in out
  finished = {p: p.stat().st_mtime_ns for p in groups.glob("*/metrics.jsonl")}
  assert len(finished) == 2
  assert ran(tmp_path, f"--sweep={path}", "--workdir=killed")[0] == 0
  assert {p: p.stat().st_mtime_ns for p in finished} == finished  # nothing again
  # In processes too: this one has several devices, and sums differ by rounding. Groups
  # that run side by side are the same.
  assert ran(tmp_path, f"--sweep={path}", "--workdir=whole", TOGETHER)[0] == 0
  for group in launch.read(tmp_path / "whole"):
    one, other = (
      launch.run_folder(tmp_path / name, group.id) for name in ("killed", "whole")
    )
    tiny.assert_same_runs(one, other, 200)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_stopped_sweep_says_so(tmp_path, at_once):
  if at_once > PROCESSORS:
    pytest.skip("needs two processors")
  path = file(tmp_path, base='{"train__length": "100000 steps"}')
  process = start(tmp_path, f"--sweep={path}", "--workdir=runs", f"--at_once={at_once}")
  deadline = time.monotonic() + 300
  while len(list((tmp_path / "runs").glob("groups/*/metrics.jsonl"))) < at_once:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=120)
  assert process.returncode == 75, err
  assert "the same command goes on" in err
  assert f"{3 * at_once} stopped" in overview.status(tmp_path / "runs")


def test_groups_at_once_share_the_processors():
  shares = local._shares(PROCESSORS)
  if PROCESSORS > 1:
    assert sorted(p for share in shares for p in share) == sorted(AFFINITY)
  assert local._shares(1) == [None]
  for wrong in (0, -1, PROCESSORS + 1):
    with pytest.raises(ConfigError, match=f"--at_once={wrong}: expected"):
      local._shares(wrong)


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path):
  def said(space, *arguments):
    path = file(tmp_path, space)
    code, _, err = ran(tmp_path, f"--sweep={path}", "--workdir=runs", *arguments)
    assert code == 2 and "Traceback" not in err, err
    assert not (tmp_path / "runs").exists()
    (line,) = err.strip().splitlines()
    return line

  assert "did you mean 'dropout'" in said('grid("model.drpout", [0.1])')
  # Eight pixels do not hold a patch of nine: found by the plan, in the second group.
  assert "patch" in said('grid("model.patch", [2, 9])')
  assert "ZeroDivisionError" in said("1 / 0")
  assert "no such file" in ran(tmp_path, "--sweep=x.py", "--workdir=runs")[2]
  assert "--workdir" in ran(tmp_path, "--status")[2]
  assert "no sweep.json" in ran(tmp_path, "--status", "--workdir=.")[2]


def test_dry_run_and_commands(tmp_path):
  path = file(tmp_path, base='{"data__val": 0.2}')
  code, out, err = ran(tmp_path, f"--sweep={path}", "--workdir=runs", "--dry_run")
  assert code == 0, err
  assert out.startswith("6 trials in 2 programs; ")
  assert not (tmp_path / "runs").exists()
  # Together with data.val of the file they can be, with the defaults they could not.
  settings = [
    "--config.train.length=5 steps",
    "--config.train.halving=('4 steps', 0.5)",
  ]
  code, out, err = ran(
    tmp_path, f"--sweep={path}", "--workdir=runs", "--launcher=commands", *settings
  )
  assert code == 0, err
  lines = out.strip().splitlines()
  assert len(lines) == 2
  environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": ""}
  done = subprocess.run(
    shlex.split(lines[1]), env=environment, cwd="/", capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  states = [launch.state(tmp_path / "runs", g) for g in launch.read(tmp_path / "runs")]
  assert [s["state"] for s in states] == ["waiting", "done"]
  assert states[1]["step"] == 5


def test_the_sweeps_of_the_repository_can_be_planned(monkeypatch):
  """Those of sets that are not there are planned with images of their shape."""

  def blank(shape):
    def split(n):
      return Split(np.zeros((n, *shape), np.uint8), np.arange(n, dtype=np.int32) % 10)

    def load(data, seed):
      del seed
      classes = tuple("abcdefghij")
      mean = std = (0.5,) * shape[2]
      return Dataset(data.name, split(50_000), None, split(10), classes, mean, std, "")

    return load

  monkeypatch.setitem(datasets.SOURCES, "fashion_mnist", blank((28, 28, 1)))
  monkeypatch.setitem(datasets.SOURCES, "cifar10", blank((32, 32, 3)))
  files = sorted((ROOT / "configs" / "sweeps").glob("*.py"))
  assert files
  for path in files:
    assert launch.make(None, *config_files.read_sweep(path), write=False)

"""Exit codes and messages of the scripts."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

FAKES = """
import contextlib, io, json, sys
sys.argv = ["script.py", "one", "two"]
from vit_jax import command, errors
from vit_jax.config import ConfigError

def fake(error):
  def function(arguments):
    assert arguments == ["one", "two"], arguments
    if error is not None:
      raise error
  return function

kinds = {
  "done": None,
  "stopped": errors.Stopped("SIGTERM at step 3"),
  "diverged": errors.Diverged("step 4: loss nan"),
  "config": ConfigError("model.width=-1 is\\nwrong"),
  "file": FileNotFoundError("no config.json in runs/x"),
  "folder": NotADirectoryError(20, "Not a directory", "runs/x"),
  "permission": PermissionError(13, "Permission denied", "/runs"),
  "exit": SystemExit(2),
  "bug": RuntimeError("a bug"),
  "value": ValueError("a bug"),
  "disk": OSError(28, "No space left on device"),
  "interrupt": KeyboardInterrupt(),
}
out = {}
for name, error in kinds.items():
  text = io.StringIO()
  code = "none"
  with contextlib.redirect_stderr(text):
    try:
      command.main(fake(error), "A script.")
    except SystemExit as stop:
      code = stop.code or 0
    except BaseException as escaped:
      code = f"raised {type(escaped).__name__}"
  out[name] = [code, text.getvalue()]
assert "jax" not in sys.modules
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found():
  done = subprocess.run(
    [sys.executable, "-c", FAKES], capture_output=True, text=True, cwd=ROOT
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
  "kind, code, text",
  [
    ("done", 0, ""),
    ("stopped", 75, "stopped: SIGTERM at step 3\n"),
    ("diverged", 1, "failed: step 4: loss nan\n"),
    ("config", 2, "error: model.width=-1 is wrong\n"),
    ("file", 2, "error: no config.json in runs/x\n"),
    ("folder", 2, "error: [Errno 20] Not a directory: 'runs/x'\n"),
    ("permission", 2, "error: [Errno 13] Permission denied: '/runs'\n"),
    ("exit", 2, ""),
    ("disk", 1, "failed: [Errno 28] No space left on device\n"),
    ("interrupt", 130, "interrupted\n"),
  ],
)
def test_exit_codes(found, kind, code, text):
  assert found[kind] == [code, text]


@pytest.mark.parametrize("kind", ["bug", "value"])
def test_a_bug_keeps_its_traceback(found, kind):
  """It leaves `main` as it came, so that Python prints it and exits with 1."""
  assert found[kind][0].startswith("raised ")


@pytest.mark.parametrize(
  "script, names",
  [
    ("train", ["--config", "--workdir", "--dry_run", "--profile"]),
    ("evaluate", ["--workdir", "--step", "--ema", "--member", "--split", "--pictures"]),
    ("predict", ["--workdir", "--member", "--top", "--out"]),
  ],
)
def test_help_shows_all_flags_of_the_script(script, names):
  done = subprocess.run(
    [sys.executable, f"scripts/{script}.py", "--help"],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  flags = [line.split(":")[0].strip() for line in done.stdout.splitlines()]
  for name in names:
    assert {name, name.replace("--", "--[no]")} & set(flags), (name, done.stdout)


def test_a_reader_that_has_enough_is_no_error():
  code = """
import sys
sys.argv = ["script.py"]
from vit_jax import command
command.main(lambda arguments: [print("x" * 100) for _ in range(5000)], "A script.")
"""
  process = subprocess.Popen(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  process.stdout.readline()
  process.stdout.close()
  assert process.stderr.read() == ""
  assert process.wait() == 1


@pytest.mark.parametrize(
  "script, arguments, word",
  [
    ("train", ["--config=configs/digits.py"], "--workdir is missing"),
    ("train", ["--config=configs/digits.py", "stray"], "unexpected ['stray']"),
    ("evaluate", [], "--workdir is missing"),
    ("evaluate", ["--workdir=x", "--stp=3"], "stp"),
    ("evaluate", ["--workdir=x", "--ema=perhaps"], "ema"),
    ("predict", ["--workdir=x"], "no pictures"),
    ("predict", ["--workdir=x", "--top=0", "a.png"], "top"),
    ("evaluate", ["--workdir=x", "--out="], "--out is empty"),
  ],
)
def test_scripts_refuse_in_one_line(script, arguments, word):
  code = f"""
import runpy, sys
sys.argv = {[f"scripts/{script}.py", *arguments]!r}
try:
  runpy.run_path(sys.argv[0], run_name="__main__")
finally:
  assert "jax" not in sys.modules
"""
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
  )
  assert done.returncode == 2, done.stderr
  assert word in done.stderr and done.stderr.count("\n") == 1, done.stderr
  assert done.stdout == ""

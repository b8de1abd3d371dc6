"""What a run ran on."""

import datetime
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from vit_jax import provenance, records


def test_environment_says_what_ran(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["train.py", "--workdir=a b"])
  environment = provenance.environment()
  records.write_json(tmp_path / "environment.json", environment)
  assert records.read_json(tmp_path / "environment.json", 1) == environment
  assert environment["packages"]["numpy"] == np.__version__
  assert set(environment["packages"]) == set(provenance.PACKAGES)
  assert environment["python"] == sys.version.split()[0]
  assert environment["devices"]["count"] == 4
  assert environment["devices"]["processes"] == 1
  assert environment["command"] == ["train.py", "--workdir=a b"]
  started = datetime.datetime.fromisoformat(environment["started"])
  age = datetime.datetime.now(datetime.UTC) - started
  assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)


def test_differences_names_what_changed_and_only_that():
  old = {
    "python": "3.11.7",
    "packages": {"jax": "0.10.2", "optax": "0.2.8", "vit_jax": None},
    "git": {"commit": "a" * 40, "dirty": False},
    "devices": {"kind": "cpu", "count": 4, "processes": 1},
    "command": ["a"],
    "started": "2020",
  }
  new = json.loads(json.dumps(old)) | {"command": ["b"], "started": "2021"}
  assert provenance.differences(old, new) == []
  new["packages"] |= {"jax": "0.12.0", "vit_jax": "0.1.0"}
  new["git"]["dirty"] = True
  new["devices"]["count"] = 8
  assert provenance.differences(old, new) == [
    "jax 0.10.2 -> 0.12.0",
    "vit_jax none -> 0.1.0",
    "commit aaaaaaaaaa -> aaaaaaaaaa with changes",
    "number of devices 4 -> 8",
  ]
  assert "commit aaaaaaaaaa -> none" in provenance.differences(
    old, {**old, "git": None}
  )


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path, monkeypatch):
  def git(*command):
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
      ["git", "-C", tmp_path / "repo", *name, *command], capture_output=True, check=True
    )
    return done.stdout.decode().strip()

  package = tmp_path / "repo" / "vit_jax"
  package.mkdir(parents=True)
  assert provenance._git(package) is None
  git("init", "-q")
  (package / "a.py").write_text("x = 1")
  assert provenance._git(package) is None  # no commit yet
  git("add", ".")
  git("commit", "-q", "-m", "first")
  commit = git("rev-parse", "HEAD")
  assert provenance._git(package) == {"commit": commit, "dirty": False}
  monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
  assert provenance._git(package) == {"commit": commit, "dirty": False}
  monkeypatch.delenv("GIT_DIR")
  (package / "a.py").write_text("x = 2")
  assert provenance._git(package) == {"commit": commit, "dirty": True}
  # Installed somewhere below another project: that commit is not ours.
  deeper = tmp_path / "repo" / ".venv" / "vit_jax"
  deeper.mkdir(parents=True)
  assert provenance._git(deeper) is None
  monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
  assert provenance._git(package) is None

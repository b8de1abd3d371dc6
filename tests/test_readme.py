"""The README's commands, links and files are real."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_two_commands_stand_at_the_top():
  blocks = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)[:2]
  for block in blocks:
    assert "\n" not in block and block.startswith("python3 -m venv .venv && ")
    assert "pip install -q -r requirements.txt" in block
  assert "scripts/train.py --config configs/digits.py" in blocks[0]
  assert "pytest" in blocks[1] and "ruff check" in blocks[1]


def test_ci_runs_the_second_command():
  """The line that .ci/run takes out of the README is the test command, and only it."""
  script = (ROOT / ".ci" / "run").read_text()
  pattern = re.search(r"sed -n '(.*)' README.md", script)[1]
  found = subprocess.run(
    ["sed", "-n", pattern, "README.md"], cwd=ROOT, capture_output=True, text=True
  ).stdout.strip()
  blocks = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
  assert found == blocks[1]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
  assert (ROOT / target).exists()


@pytest.mark.parametrize(
  "file", sorted(set(re.findall(r"(?:configs|scripts|examples)/\w+\.py", README)))
)
def test_named_files_exist(file):
  assert (ROOT / file).exists()


def test_requirements_end_with_the_package():
  lines = (ROOT / "requirements.txt").read_text().split("\n")
  assert [line for line in lines if line and not line.startswith("#")][-1] == "-e ."

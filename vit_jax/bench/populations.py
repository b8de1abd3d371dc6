"""Eight members in one program against eight runs, start-up included."""

import subprocess
import sys
import tempfile

from vit_jax.bench import race, report, sizes
from vit_jax.config import override

MEMBERS = 8
TOGETHER = """
import sys
from vit_jax import command, train
from vit_jax.bench import sizes
from vit_jax.config import override
command.prepare_jax()
folder, length, members = sys.argv[1:]
base = override(sizes.recipe("digits"), {"train.length": length})
train.run(base, folder, members=[{"seed": i} for i in range(int(members))])
"""


def run(lengths, rounds) -> report.Result:
  """Times both ways for runs of each length, as whole processes; all compiled before.

  Args:
    lengths: of the runs, such as "10 epochs".
    rounds: turns.
  """
  for length in lengths:
    override(sizes.recipe("digits"), {"train.length": length})
  rows, raw = [], {}
  for length in lengths:
    with tempfile.TemporaryDirectory() as folder:
      ways = {
        "one program": lambda i, f=folder, n=length: _together(f"{f}/t{i}", n),
        "eight runs": lambda i, f=folder, n=length: _apart(f"{f}/a{i}", n),
      }
      for i, way in enumerate(ways.values()):
        way(-1 - i)
      seconds = {name: [] for name in ways}
      for i in range(rounds):
        for name, way in ways.items():
          seconds[name].append(race.seconds(lambda way=way, i=i: way(i)))
    raw[length] = seconds
    ratio = [a / b for a, b in zip(*seconds.values())]
    for name, values in seconds.items():
      rows.append(
        {
          "way": f"{name}, {length}",
          "seconds": race.spread(values),
          "share of eight runs": race.spread(ratio) if name == "one program" else None,
        }
      )
  return report.Result(
    name="population",
    title=f"{MEMBERS} seeds of digits",
    rows=rows,
    limits={},
    notes={"rounds": rounds},
    raw=raw,
    plot=("seconds", None),
  )


def _together(folder, length):
  arguments = [folder, length, str(MEMBERS)]
  subprocess.run(
    [sys.executable, "-c", TOGETHER, *arguments], check=True, capture_output=True
  )


def _apart(folder, length):
  for seed in range(MEMBERS):
    command = sizes.train_command(
      "digits",
      workdir=f"{folder}/{seed}",
      config__train__length=length,
      config__seed=seed,
    )
    subprocess.run(command, check=True, capture_output=True)

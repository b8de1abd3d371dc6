"""What a benchmark found: one JSON file, one Markdown table, one figure."""

import dataclasses
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import provenance

SCHEMA = 2
PEERS = ("torch", "timm", "vit-pytorch", "equimo")


@dataclasses.dataclass(frozen=True)
class Result:
  """What one run of the benchmark found.

  A figure that was taken several times is a tuple (median, least, most).

  Attributes:
    name: of its files.
    title: one line.
    rows: one mapping from column to figure for each contender, all with the same
      columns.
    limits: figures of the machine from the same run.
    notes: what else a reader must know.
    raw: every single reading.
    plot: column that the figure shows, and the column of its horizontal axis (None:
      bars by the first column).
  """

  name: str
  title: str
  rows: Sequence[Mapping[str, Any]]
  limits: Mapping[str, Any]
  notes: Mapping[str, Any]
  raw: Mapping[str, Any]
  plot: tuple[str, str | None] = ("images/s", None)


def machine() -> dict[str, Any]:
  """Returns what the figures depend on: processor, versions, commit."""
  found = provenance.environment()
  found["peers"] = {name: provenance.version(name) for name in PEERS}
  found["processor"], found["cores"] = _processor(), os.cpu_count()
  for name in ("command", "host", "schema"):
    del found[name]
  return found


def markdown(result: Result, machine: Mapping[str, Any]) -> str:
  """Returns the table with all that stands around it."""
  columns = list(result.rows[0])
  lines = [f"### {result.title}", "", _line(columns), _line(["---"] * len(columns))]
  lines += [_line(map(shown, row.values())) for row in result.rows]
  lines.append("")
  for name, value in {**result.limits, **result.notes}.items():
    lines.append(f"- {name}: {shown(value)}")
  packages = {**machine["packages"], **machine["peers"]}
  versions = ", ".join(f"{n} {v}" for n, v in packages.items() if v)
  commit = machine["git"] or {"commit": "unknown", "dirty": False}
  changed = " with changes" if commit["dirty"] else ""
  lines.append(f"- machine: {machine['processor']}, {machine['cores']} cores")
  lines.append(f"- Python {machine['python']}, {versions}")
  lines.append(f"- commit {commit['commit'][:10]}{changed}, {machine['started']}")
  return "\n".join(lines) + "\n"


def write(result: Result, folder) -> list[pathlib.Path]:
  """Prints the table; with a folder writes NAME.json, NAME.md and NAME.png there.

  Returns:
    The files. Without matplotlib there is no figure.
  """
  of_machine = machine()
  text = markdown(result, of_machine)
  if folder is None:
    print(text)
    return []
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  files = [folder / f"{result.name}{ending}" for ending in (".json", ".md", ".png")]
  content = {"schema": SCHEMA, **dataclasses.asdict(result), "machine": of_machine}
  files[0].write_text(json.dumps(content, indent=1) + "\n")
  files[1].write_text(text)
  plotted = _plot(result, files[2])
  print(text)
  return files if plotted else files[:2]


def shown(value) -> str:
  """Returns a figure as a table shows it: `120 (118 to 127)`."""
  if value is None:
    return "-"
  if isinstance(value, Mapping):
    return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
  if isinstance(value, tuple | list):
    middle, least, most = map(shown, value)
    return f"{middle} ({least} to {most})"
  if isinstance(value, float):
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 20 else 1 if value < 200 else 0
    return f"{value:,.{digits}f}"
  return f"{value:,}" if isinstance(value, int) else str(value)


def _line(cells):
  return "| " + " | ".join(cells) + " |"


def _plot(result, file):
  try:
    from matplotlib.figure import Figure
  except ImportError:
    print("no figure: pip install -e '.[plots]'")
    return False
  column, axis = result.plot
  name = next(iter(result.rows[0]))
  rows = [row for row in result.rows if row[column] is not None]
  figure = Figure(figsize=(7, 4 if axis else 1.2 + 0.4 * len(rows)), layout="tight")
  axes = figure.add_subplot()
  if axis is None:
    values = [_triple(row[column]) for row in rows][::-1]
    middle = [v[0] for v in values]
    spread = [[v[0] - v[1] for v in values], [v[2] - v[0] for v in values]]
    axes.barh([str(row[name]) for row in rows][::-1], middle, xerr=spread, capsize=3)
    axes.set_xlabel(column)
  else:
    for label in dict.fromkeys(row[name] for row in rows):
      points = [(r[axis], _triple(r[column])[0]) for r in rows if r[name] == label]
      axes.loglog(*zip(*points), marker="o", label=label)
    axes.set_xlabel(axis)
    axes.set_ylabel(column)
    axes.legend(fontsize="small")
  axes.set_title(result.title, fontsize="medium")
  figure.savefig(file, dpi=150)
  return True


def _triple(value):
  return value if isinstance(value, tuple | list) else (value, value, value)


def _processor():
  try:
    with open("/proc/cpuinfo") as file:
      for line in file:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()

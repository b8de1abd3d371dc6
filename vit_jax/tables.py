"""Tables for a terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Returns a table of rows, which may be of different lengths, its columns padded."""
  widths = [
    max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))
  ]
  lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows)
  return "\n".join(f"  {line}".rstrip() for line in lines)


def number(value: int | None) -> str:
  """Returns a whole number as a table shows it."""
  return "-" if value is None else f"{value:,}"

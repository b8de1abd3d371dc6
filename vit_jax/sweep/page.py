"""A small document: headings, paragraphs, tables and figures, as Markdown and as HTML.

What comes from names and messages is escaped; nothing of it can become markup.
"""

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
  """A text that leads to a file, relative to the page."""

  text: str
  target: str


Cell = str | Link


@dataclasses.dataclass
class Page:
  """Blocks in order; see the methods that add them."""

  title: str
  blocks: list[tuple] = dataclasses.field(default_factory=list)

  def heading(self, text: str) -> None:
    self.blocks.append(("heading", text))

  def text(self, text: str) -> None:
    self.blocks.append(("text", text))

  def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    self.blocks.append(("table", header, rows))

  def figure(self, file: str, caption: str) -> None:
    self.blocks.append(("figure", file, caption))

  def markdown(self) -> str:
    """Returns the page as Markdown."""
    lines = [f"# {_marked(self.title)}", ""]
    for kind, *content in self.blocks:
      if kind == "heading":
        lines += [f"## {_marked(content[0])}", ""]
      elif kind == "text":
        lines += [_marked(content[0]), ""]
      elif kind == "figure":
        lines += [f"![{_marked(content[1])}]({content[0]})", ""]
      else:
        header, rows = content
        lines += [_row(header), _row(["---"] * len(header)), *map(_row, rows), ""]
    return "\n".join(lines)

  def html(self) -> str:
    """Returns the page as HTML, whole but for the figures, which lie beside it."""
    parts = []
    for kind, *content in self.blocks:
      if kind == "heading":
        parts.append(f"<h2>{html.escape(content[0])}</h2>")
      elif kind == "text":
        parts.append(f"<p>{html.escape(content[0])}</p>")
      elif kind == "figure":
        file, caption = map(html.escape, content)
        parts.append(
          f'<figure><img src="{file}" alt="{caption}"><figcaption>{caption}'
          "</figcaption></figure>"
        )
      else:
        header, rows = content
        parts.append(
          "<table><thead>"
          + _cells(header, "th")
          + "</thead><tbody>"
          + "\n".join(_cells(row, "td") for row in rows)
          + "</tbody></table>"
        )
    title, body = html.escape(self.title), "\n".join(parts)
    return (
      f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}'
      f"</title><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n"
      "</body></html>\n"
    )


_STYLE = (
  "body{font:15px/1.5 sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
  "table{border-collapse:collapse;display:block;overflow-x:auto}"
  "th,td{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:left;"
  "white-space:nowrap}img{max-width:100%}figure{margin:1em 0}"
)


def _row(cells):
  return "| " + " | ".join(map(_markdown_cell, cells)) + " |"


def _markdown_cell(cell):
  if isinstance(cell, Link):
    target = cell.target.replace(" ", "%20").replace("(", "%28").replace(")", "%29")
    return f"[{_marked(cell.text)}]({target})"
  return _marked(cell)


def _marked(text):
  """Escapes what Markdown would read as markup."""
  text = re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)
  return " ".join(text.split())


def _cells(cells, tag):
  return (
    "<tr>" + "".join(f"<{tag}>{_html_cell(cell)}</{tag}>" for cell in cells) + "</tr>"
  )


def _html_cell(cell):
  if isinstance(cell, Link):
    return f'<a href="{html.escape(cell.target)}">{html.escape(cell.text)}</a>'
  return html.escape(cell)

"""The report of a sweep: tables, tests and figures, and in words what can be claimed.

report/report.md, report/report.html   the same page
report/trials.csv                      a row a trial
report/*.png                           figures (extra `plots`)
"""

import csv
import dataclasses
import io
import math
import os
from collections.abc import Sequence
from typing import Any

from vit_jax import records
from vit_jax.config import ConfigError
from vit_jax.sweep import launch, results, statistics
from vit_jax.sweep.page import Link, Page
from vit_jax.tables import number

# Metrics that are fractions, shown in percent.
_SHARES = ("accuracy", "top5", "ece")


@dataclasses.dataclass(frozen=True)
class Question:
  """What a report is asked.

  Attributes:
    by: settings (or "arm") that make an arm.
    within: settings whose values are reported apart, as budgets are.
    pair: setting by which trials of two arms are paired.
    metric: as in metrics.jsonl; its last value counts.
    against: the arm that the others are compared with, its values joined by commas;
      None: the first.
    band: differences up to this count as none, in the unit of the table; None: 0.25
      points of an accuracy, 0.01 of another metric.
    tune: setting of which each arm is judged with its best value; None: no such.
    tune_metric: that chooses the value. Not `metric`, which would favour the arm with
      more values.
  """

  by: tuple[str, ...]
  within: tuple[str, ...] = ()
  pair: str = "seed"
  metric: str = "test/accuracy"
  against: str | None = None
  band: float | None = None
  tune: str | None = None
  tune_metric: str = "val/accuracy"

  @property
  def _is_share(self) -> bool:
    return self.metric.endswith(_SHARES)

  @property
  def scale(self) -> float:
    return 100.0 if self._is_share else 1.0

  @property
  def unit(self) -> str:
    return " points" if self._is_share else ""

  @property
  def shown_metric(self) -> str:
    return f"{self.metric} in %" if self._is_share else self.metric

  @property
  def tolerance(self) -> float:
    if self.band is not None:
      return self.band
    return 0.25 if self._is_share else 0.01


def write(folder, question: Question, out=None) -> Any:
  """Writes the report of a sweep.

  Args:
    folder: of the sweep.
    question: what is compared.
    out: folder of the report; None: `report` in that of the sweep.

  Returns:
    The file of the Markdown page.

  Raises:
    ConfigError: settings, a metric or an arm that are not in this sweep.
  """
  outcomes = results.read(folder)
  results.check_metric(outcomes, question.metric)
  if question.tune is not None:
    results.check_metric(outcomes, question.tune_metric, "tune_metric")
    if question.tune in (*question.by, *question.within):
      raise ConfigError(f"--tune={question.tune} is in --by or --within as well")
  out = records.resolve(folder) / "report" if out is None else records.resolve(out)
  out.mkdir(parents=True, exist_ok=True)
  place = records.resolve(folder)
  page = Page(f"{place.name}: {question.metric} by {', '.join(question.by)}")
  done = sum(o.state == results.DONE for o in outcomes)
  page.text(f"{done} of {len(outcomes)} trials are done; those alone are counted.")
  everything = outcomes
  if question.tune is not None:
    outcomes = _tuned(page, question, outcomes)
  for values, part in results.arms(outcomes, question.within).items():
    if question.within:
      page.heading(
        ", ".join(f"{n} = {_text(v)}" for n, v in zip(question.within, values))
      )
    _compare(page, question, part, place, out)
  _failures(page, everything, place, out)
  _figures(page, question, outcomes, out)
  (out / "trials.csv").write_text(_csv(everything), encoding="utf-8")
  page.text("Every trial with its settings and metrics: trials.csv.")
  (out / "report.html").write_text(page.html(), encoding="utf-8")
  (out / "report.md").write_text(page.markdown(), encoding="utf-8")
  return out / "report.md"


def _tuned(page, question, outcomes):
  """Says which value each arm is judged with; returns the trials that have it."""
  by = (*question.within, *question.by)
  kept, chosen = results.tuned(outcomes, by, question.tune, question.tune_metric)
  page.text(
    f"Each arm is judged with the value of {question.tune} whose mean of "
    f"{question.tune_metric} is best; where that is the least or greatest that was "
    "tried, a better one may lie beyond."
  )
  scale = 100.0 if question.tune_metric.endswith(_SHARES) else 1.0
  rows = []
  for arm, choice in chosen.items():
    numbers = all(isinstance(value, int | float) for value in choice.tried)
    ends = numbers and choice.value in (min(choice.tried), max(choice.tried))
    rows.append(
      [
        *map(_text, arm),
        _text(choice.value),
        ", ".join(map(_text, choice.tried)),
        _figure(choice.mean * scale),
        "yes" if ends else "no",
      ]
    )
  page.table([*by, question.tune, "tried", question.tune_metric, "at an end"], rows)
  return kept


def _compare(page, question, outcomes, place, out):
  arms = results.arms(outcomes, question.by)
  values = {
    arm: {
      k: v * question.scale
      for k, v in results.by_pair(members, question.pair, question.metric).items()
    }
    for arm, members in arms.items()
  }
  _arm_table(page, question, arms, values, place, out)
  _pair_table(page, question, values)


def _arm_table(page, question, arms, values, place, out):
  rows = []
  for arm, members in arms.items():
    found = values[arm]
    facts = members[0].facts
    row = [_text(v) for v in arm]
    if found:
      s = statistics.summary(list(found.values()))
      row += [str(s.n), _figure(s.mean), _figure(s.sd), _interval(s.low, s.high)]
    else:
      row += ["0", "-", "-", "-"]
    taken = [m.seconds for m in members if m.state == results.DONE]
    row += [
      number(facts.get("tokens")),
      number(facts.get("parameters")),
      f"{facts['macs'] / 1e6:,.2f}" if "macs" in facts else "-",
      f"{sum(taken) / len(taken):,.1f}" if taken else "-",
      _links(members, place, out),
    ]
    rows.append(row)
  page.table(
    [
      *question.by,
      "n",
      question.shown_metric,
      "sd",
      "95 % interval",
      "tokens",
      "parameters",
      "M MACs",
      "s a trial",
      "run",
    ],
    rows,
  )


def _links(members, place, out):
  """Leads to the run folder of an arm; to the first of several."""
  groups = list(dict.fromkeys(m.group for m in members))
  text = groups[0] + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")
  return Link(text, _relative(launch.run_folder(place, groups[0]), out))


def _relative(target, out):
  return os.path.relpath(os.fspath(target), os.fspath(out))


def _pair_table(page, question, values):
  reference = _reference(question, values)
  compared = {}
  for arm, found in values.items():
    both = [k for k in found if k in values[reference]]
    if arm != reference and len(both) > 1:
      compared[arm] = statistics.paired(
        [found[k] for k in both],
        [values[reference][k] for k in both],
        question.tolerance,
      )
  if not compared:
    page.text(
      f"No two arms have two trials of the same {question.pair} that are done: nothing "
      "is compared."
    )
    return
  corrected = statistics.holm([c.p for c in compared.values()])
  rows = []
  for (arm, c), p in zip(compared.items(), corrected):
    rows.append(
      [
        ", ".join(map(_text, arm)),
        str(c.n),
        f"{c.mean:+.3g}",
        _figure(c.sd),
        _interval(c.low, c.high),
        f"{c.p:.3g}",
        f"{p:.3g}",
        f"{c.wins:.2f} ({c.wins_low:.2f} to {c.wins_high:.2f})",
        f"{c.equivalent_p:.2g}",
        statistics.verdict(c, p, question.tolerance, question.unit),
      ]
    )
  named = ", ".join(map(_text, reference))
  page.text(
    f"Differences from {named}, paired by {question.pair}, in {question.shown_metric}: "
    "mean, BCa interval of 95 %, exact sign-flip test, corrected for the number of arms "
    f"(Holm), P(higher than {named}), and the test that the difference is within "
    f"{question.tolerance:g}."
  )
  page.table(
    [
      "arm",
      "pairs",
      "difference",
      "sd",
      "95 % interval",
      "p",
      "p (Holm)",
      "P(higher)",
      "p (same)",
      "what can be claimed",
    ],
    rows,
  )


def _reference(question, values):
  if question.against is None:
    return next(iter(values))
  for arm in values:
    if ",".join(map(_text, arm)) == question.against:
      return arm
  known = "; ".join(",".join(map(_text, arm)) for arm in values)
  raise ConfigError(f"--against={question.against}: expected one of {known}")


def _failures(page, outcomes, place, out):
  rows = []
  for outcome in outcomes:
    if outcome.state != results.DONE:
      last = outcome.message.strip().splitlines()[-1:]
      folder = _relative(launch.run_folder(place, outcome.group), out)
      rows.append(
        [Link(outcome.trial.name, folder), outcome.state, last[0] if last else ""]
      )
  if rows:
    page.heading("Trials that are not done")
    page.table(["trial", "is", "why"], rows)


def _figures(page, question, outcomes, out):
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    page.text("No figures: pip install -e '.[plots]'")
    return
  from vit_jax.sweep import figures

  for file, caption in figures.draw(question, outcomes, out):
    page.figure(file, caption)


def _csv(outcomes) -> str:
  """Returns a row a trial: what it is, its overrides, its last metrics."""
  settings = list(dict.fromkeys(n for o in outcomes for n in o.trial.overrides))
  metrics = sorted(
    {
      n
      for o in outcomes
      for row in o.rows
      for n in row
      if n.startswith(("val", "test"))
    }
  )
  facts = ["steps", "tokens", "parameters", "macs"]
  header = ["trial", "group", "state", "arm", *settings, *metrics, *facts, "seconds"]
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(header)
  for o in outcomes:
    row = [o.trial.name, o.group, o.state, o.trial.arm or ""]
    row += [_text(o.setting(n)) for n in settings]
    row += [o.final(n) for n in metrics]
    row += [o.facts.get(n) for n in facts]
    writer.writerow([_safe(cell) for cell in [*row, f"{o.seconds:.2f}"]])
  return text.getvalue()


def _safe(cell):
  """A spreadsheet takes a text that begins like this for a formula."""
  if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
    try:
      float(cell)
    except ValueError:
      return "'" + cell
  return "" if cell is None else cell


def _text(value) -> str:
  return "-" if value is None else str(value)


def _figure(value: float) -> str:
  return "-" if math.isnan(value) else f"{value:.4g}"


def _interval(low: float, high: float) -> str:
  return "-" if math.isnan(low) else f"{low:.4g} to {high:.4g}"


def parts(text: str | Sequence[str]) -> tuple[str, ...]:
  """Returns the names of a flag: "arm,train.length"."""
  pieces = text.split(",") if isinstance(text, str) else text
  return tuple(piece.strip() for piece in pieces if piece.strip())

"""Figures of a sweep; needs matplotlib (extra `plots`)."""

import statistics

from matplotlib import colormaps
from matplotlib.figure import Figure

from vit_jax.sweep import results


def draw(question, outcomes, out) -> list[tuple[str, str]]:
  """Draws what there is to draw; returns the files, in `out`, and what they show."""
  drawn = []
  for name, function, caption in (
    ("curves.png", _curves, f"{question.metric} along the way, mean of each arm"),
    ("cost.png", _cost, f"{question.metric} against cost; the line is the frontier"),
    ("slices.png", _slices, f"{question.metric} against what was tried"),
  ):
    figure = function(question, outcomes)
    if figure is not None:
      with (out / name).open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
      drawn.append((name, caption))
  return drawn


def _label(arm):
  return ", ".join(map(str, arm))


def _colours(question, outcomes):
  """Returns a colour for each arm, the same in all figures."""
  arms = list(results.arms(outcomes, question.by))
  palette = _palette(len(arms))
  return {arm: palette[n % len(palette)] for n, arm in enumerate(arms)}


def _palette(number):
  return colormaps["tab10" if number <= 10 else "tab20"].colors


def _legend(axes):
  """Puts the legend beside the last picture, where it hides nothing."""
  axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _curves(question, outcomes):
  """The curve of a metric that is measured along the way: validation, else training.
  One picture for each value of `within`."""
  prefix, _, kind = question.metric.partition("/")
  names = [f"{p}/{kind}" for p in (prefix.replace("test", "val"), prefix, "train")]
  name = next((n for n in names if any(len(o.curve(n)) > 1 for o in outcomes)), None)
  if name is None:
    return None
  colours = _colours(question, outcomes)
  parts = results.arms(outcomes, question.within)
  figure = Figure(figsize=(4.5 * len(parts) + 1.5, 4), layout="constrained")
  pictures = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
  for axes, (values, part) in zip(pictures, parts.items()):
    for arm, members in results.arms(part, question.by).items():
      by_step = {}
      for member in members:
        for step, value in member.curve(name):
          by_step.setdefault(step, []).append(value * question.scale)
      if by_step:
        steps = sorted(by_step)
        middle = [statistics.fmean(by_step[s]) for s in steps]
        axes.plot(steps, middle, color=colours[arm], label=_label(arm))
        low, high = ([end(by_step[s]) for s in steps] for end in (min, max))
        axes.fill_between(steps, low, high, color=colours[arm], alpha=0.12)
    axes.set(xlabel="step", title=_label(values))
  pictures[0].set_ylabel(f"{name}, mean (least to most)")
  _legend(pictures[-1])
  return figure


def _cost(question, outcomes):
  """One line an arm, through the values of `within`."""
  lines = {}
  for arm, members in results.arms(outcomes, question.by).items():
    for part in results.arms(members, question.within).values():
      found = [m for m in part if m.final(question.metric) is not None]
      if found and "flops" in found[0].facts:
        value = statistics.fmean(
          m.final(question.metric) * question.scale for m in found
        )
        seconds = statistics.fmean(m.seconds for m in found)
        lines.setdefault(arm, []).append((found[0].facts["flops"], seconds, value))
  points = [point for line in lines.values() for point in line]
  if len(points) < 2:
    return None
  best = min if question.metric.endswith("loss") else max
  colours = _colours(question, outcomes)
  figure = Figure(figsize=(11, 4), layout="constrained")
  pictures = figure.subplots(1, 2, sharey=True)
  for place, label in ((0, "FLOPs of training"), (1, "seconds of training")):
    axes = pictures[place]
    frontier, so_far = [], None
    for point in sorted(points, key=lambda p: (p[place], p[2])):
      if so_far is None or best(point[2], so_far) != so_far:
        so_far = point[2]
        frontier.append((point[place], point[2]))
    axes.plot(*zip(*frontier), color="lightgrey", linewidth=4, drawstyle="steps-post")
    for arm, line in lines.items():
      x, y = zip(*sorted((p[place], p[2]) for p in line))
      axes.plot(x, y, "o-", markersize=4, color=colours[arm], label=_label(arm))
    axes.set(xscale="log", xlabel=label)
  pictures[0].set_ylabel(question.shown_metric)
  _legend(pictures[-1])
  return figure


def _slices(question, outcomes):
  """One picture a numeric setting that was tried at three values or more."""
  tried = []
  for name in dict.fromkeys(n for o in outcomes for n in o.trial.overrides):
    values = {o.setting(name) for o in outcomes}
    numeric = all(isinstance(v, int | float) for v in values)
    if name != question.pair and numeric and len(values) > 2:
      tried.append(name)
  if not tried:
    return None
  figure = Figure(figsize=(4.5 * len(tried) + 1.5, 4), layout="constrained")
  pictures = figure.subplots(1, len(tried), sharey=True, squeeze=False)[0]
  for axes, name in zip(pictures, tried):
    others = [n for n in (*question.within, *question.by) if n != name]
    parts = results.arms(outcomes, others)
    palette = _palette(len(parts))
    for number, (arm, members) in enumerate(parts.items()):
      by_value = {}
      for m in members:
        if (value := m.final(question.metric)) is not None:
          by_value.setdefault(m.setting(name), []).append(value * question.scale)
      if by_value:
        colour = palette[number % len(palette)]
        x = sorted(by_value)
        y = [statistics.fmean(by_value[value]) for value in x]
        axes.plot(x, y, color=colour, label=_label(arm))
        for value, found in by_value.items():
          axes.plot([value] * len(found), found, "o", markersize=3, color=colour)
    values = sorted({o.setting(name) for o in outcomes})
    if values[0] > 0 and values[-1] > 10 * values[0]:
      axes.set_xscale("log")
    if len(values) <= 8:
      axes.set_xticks(values, [f"{value:g}" for value in values])
      axes.minorticks_off()
    axes.set(xlabel=name)
    if others:
      _legend(axes)
  pictures[0].set_ylabel(question.shown_metric)
  return figure

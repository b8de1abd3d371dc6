"""Figures of a sweep; needs matplotlib (extra `plots`)."""

import statistics

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


def _arms(question, outcomes):
  return results.arms(outcomes, (*question.by, *question.within)).items()


def _label(arm):
  return ", ".join(map(str, arm))


def _curves(question, outcomes):
  """The curve of a metric that is measured along the way: validation, else training."""
  prefix, _, kind = question.metric.partition("/")
  names = [f"{p}/{kind}" for p in (prefix.replace("test", "val"), prefix, "train")]
  name = next((n for n in names if any(len(o.curve(n)) > 1 for o in outcomes)), None)
  if name is None:
    return None
  figure = Figure(figsize=(7, 4), layout="tight")
  axes = figure.add_subplot()
  for number, (arm, members) in enumerate(_arms(question, outcomes)):
    by_step = {}
    for member in members:
      for step, value in member.curve(name):
        by_step.setdefault(step, []).append(value * question.scale)
    if by_step:
      steps = sorted(by_step)
      middle = [statistics.fmean(by_step[s]) for s in steps]
      axes.plot(steps, middle, color=f"C{number % 10}", label=_label(arm))
      low, high = ([end(by_step[s]) for s in steps] for end in (min, max))
      axes.fill_between(steps, low, high, color=f"C{number % 10}", alpha=0.12)
  axes.set(xlabel="step", ylabel=f"{name}, mean (least to most)")
  axes.legend(fontsize="small")
  return figure


def _cost(question, outcomes):
  points = []
  for arm, members in _arms(question, outcomes):
    found = [m for m in members if m.final(question.metric) is not None]
    if found and "flops" in found[0].facts:
      value = statistics.fmean(m.final(question.metric) * question.scale for m in found)
      seconds = statistics.fmean(m.seconds for m in found)
      points.append((found[0].facts["flops"], seconds, value, _label(arm)))
  if len(points) < 2:
    return None
  best = min if question.metric.endswith("loss") else max
  figure = Figure(figsize=(10, 4), layout="tight")
  for place, label in ((0, "FLOPs of training"), (1, "seconds of training")):
    axes = figure.add_subplot(1, 2, place + 1)
    for point in points:
      axes.plot(point[place], point[2], "o")
      axes.annotate(point[3], (point[place], point[2]), fontsize="small")
    frontier, so_far = [], None
    for point in sorted(points, key=lambda p: (p[place], p[2])):
      if so_far is None or best(point[2], so_far) != so_far:
        so_far = point[2]
        frontier.append((point[place], point[2]))
    axes.plot(*zip(*frontier), color="grey", linewidth=1, drawstyle="steps-post")
    axes.set(xscale="log", xlabel=label, ylabel=question.shown_metric)
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
  figure = Figure(figsize=(4 * len(tried), 3.5), layout="tight")
  for number, name in enumerate(tried):
    axes = figure.add_subplot(1, len(tried), number + 1)
    for arm, members in _arms(question, outcomes):
      points = [
        (m.setting(name), m.final(question.metric) * question.scale)
        for m in members
        if m.final(question.metric) is not None
      ]
      if points:
        axes.plot(*zip(*sorted(points)), "o", markersize=4, label=_label(arm))
    values = [o.setting(name) for o in outcomes]
    if min(values) > 0 and max(values) > 10 * min(values):
      axes.set_xscale("log")
    axes.set(xlabel=name, ylabel=question.shown_metric)
  return figure

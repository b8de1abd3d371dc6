"""What a sweep is, how far it is and what is left of it, as text."""

import time

from vit_jax.sweep import launch, results
from vit_jax.tables import aligned, number

# Share of the rate of a large product that a training step is taken to have, before
# anything of the sweep was measured.
UTILISATION = 0.5


def plan(folder, groups) -> str:
  """Returns the table of the groups: trials, program, cost, what is done, hours left.

  Args:
    folder: of the sweep; None: of none.
    groups: of it.
  """
  states = [_state(folder, group) for group in groups]
  rate, source = _rate(folder, groups, states)
  rows = [("group", "trials", "steps", "tokens", "parameters", "MMACs", "hours", "is")]
  for group, state in zip(groups, states):
    facts = group.facts
    rows.append(
      (
        group.id,
        str(len(group.trials)),
        f"{facts['steps']:,}",
        number(facts.get("tokens")),
        number(facts.get("parameters")),
        f"{facts['macs'] / 1e6:,.2f}" if "macs" in facts else "-",
        _hours(_left(group, state), rate),
        state["state"],
      )
    )
  trials = sum(len(group.trials) for group in groups)
  programs = "1 program" if len(groups) == 1 else f"{len(groups)} programs"
  left = _hours(_all_left(groups, states), rate)
  return f"{trials} trials in {programs}; {left} hours left, {source}\n{aligned(rows)}"


def status(folder) -> str:
  """Returns how far each group is, which trials ended early, what failed and why."""
  groups = launch.read(folder)
  states = [_state(folder, group) for group in groups]
  rate, source = _rate(folder, groups, states)
  rows = [("group", "trials", "is", "step", "hours left", "")]
  for group, state in zip(groups, states):
    ended = [f"{name} {how['reason']}" for name, how in state["ended"].items()]
    last = state["message"].strip().splitlines()[-1:]
    rows.append(
      (
        group.id,
        str(len(group.trials)),
        state["state"],
        f"{state['step']:,}/{state['total']:,}",
        _hours(_left(group, state), rate),
        "; ".join([*ended, *last]),
      )
    )
  counts = {name: 0 for name in launch.STATES}
  for group, state in zip(groups, states):
    counts[state["state"]] += len(group.trials)
  said = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
  at_once = sum(state["state"] == "running" for state in states)
  if at_once > 1:
    source += f", {at_once} groups at once"
  left = _hours(_all_left(groups, states), rate * max(at_once, 1))
  return f"trials: {said}; {left} hours left, {source}\n{aligned(rows)}"


def _state(folder, group):
  if folder is None:
    return {"state": "waiting", "step": 0, "total": group.facts["steps"], "ended": {}}
  return launch.state(folder, group)


def _left(group, state):
  """Returns the FLOPs that are left of a group, None where they are not known."""
  if state["state"] == "done":
    return 0.0
  if "flops" not in group.facts:
    return None
  share = 1 - state["step"] / state["total"]
  return group.facts["flops"] * len(group.trials) * share


def _all_left(groups, states):
  left = [_left(group, state) for group, state in zip(groups, states)]
  return None if None in left else sum(left)


def _hours(flops, rate) -> str:
  return "-" if flops is None else f"{flops / rate / 3600:.2f}"


def _rate(folder, groups, states) -> tuple[float, str]:
  """Returns FLOPs a second, of what was trained, or of a large product, and its source."""
  flops = seconds = 0.0
  for group, state in zip(groups, states):
    if state["step"] and "flops" in group.facts:
      done = group.facts["flops"] * len(group.trials) * state["step"] / state["total"]
      taken = results.seconds(results.rows_of(launch.run_folder(folder, group.id)))
      if taken:
        flops, seconds = flops + done, seconds + taken
  if seconds:
    return flops / seconds, "at the rate of the steps so far"
  rate = UTILISATION * _product_rate()
  return rate, f"if a step has {UTILISATION:.0%} of the rate of a large product here"


def _product_rate(side: int = 2048, rounds: int = 3) -> float:
  """Returns FLOPs a second of a large product in float32, the best of some."""
  import jax
  import jax.numpy as jnp

  a = jnp.full((side, side), 1 / side)
  multiply = jax.jit(jnp.matmul)
  multiply(a, a).block_until_ready()
  best = 0.0
  for _ in range(rounds):
    begin = time.perf_counter()
    multiply(a, a).block_until_ready()
    best = max(best, 2 * side**3 / (time.perf_counter() - begin))
  return best

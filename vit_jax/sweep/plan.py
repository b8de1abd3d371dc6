"""From a space to trials, and to groups of trials that share a program.

A trial is a whole configuration with a name made of its overrides. Trials that differ
in traced settings only (`train.TRACED`) are members of one population: a group, which
has a run folder of its own.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import config as config_lib
from vit_jax import train
from vit_jax.config import Config, ConfigError
from vit_jax.sweep import space as space_lib

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Trial:
  """One training of a sweep.

  Attributes:
    name: of its overrides, unique in the sweep, the same whatever else is in it.
    arm: of an experiment, or None.
    overrides: by dotted name, as JSON values.
    config: whole.
  """

  name: str
  arm: str | None
  overrides: Mapping[str, Any]
  config: Config


@dataclasses.dataclass(frozen=True)
class Group:
  """Trials that are members of one run.

  Attributes:
    id: name of its folder.
    base: configuration of the run.
    trials: its members.
    facts: of one member: steps, and of a ViT tokens, parameters, macs and flops.
  """

  id: str
  base: Config
  trials: tuple[Trial, ...]
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def members(self) -> list[dict[str, Any]]:
    """What each member has other than `base`."""
    return [
      {
        name: config_lib.value(trial.config, name)
        for name in train.TRACED
        if config_lib.value(trial.config, name) != config_lib.value(self.base, name)
      }
      for trial in self.trials
    ]

  @property
  def names(self) -> list[str]:
    return [trial.name for trial in self.trials]


def trials(base: Config, space: Sequence[Mapping[str, Any]]) -> list[Trial]:
  """Returns the trials of a space.

  Raises:
    ConfigError: an unknown setting, a value that cannot be, two trials that are the
      same, one name of two arms.
  """
  found, seen, arms = [], {}, {}
  for number, given in enumerate(space):
    overrides = dict(given)
    arm = overrides.pop(space_lib.ARM, None)
    try:
      whole = config_lib.override(base, overrides)
    except ConfigError as error:
      raise ConfigError(f"trial {number} {overrides}: {error}") from None
    own = {} if arm is None else {n: config_lib.value(whole, n) for n in arm.settings}
    if arm is not None and arms.setdefault(arm.name, own) != own:
      raise ConfigError(f"two arms are called {arm.name!r}: {arms[arm.name]} and {own}")
    name = _name(arm, overrides, whole)
    if whole in seen:
      raise ConfigError(
        f"trials {seen[whole]!r} and {name!r} are the same; leave one out"
      )
    seen[whole] = name
    plain = config_lib.plain({n: config_lib.value(whole, n) for n in overrides})
    found.append(Trial(name, None if arm is None else arm.name, plain, whole))
  if not found:
    raise ConfigError("the sweep has no trials")
  names = [trial.name for trial in found]
  twice = sorted({n for n in names if names.count(n) > 1})
  if twice:
    raise ConfigError(f"several trials are called {twice[0]!r}: name their arms apart")
  return found


def _name(arm, overrides, whole) -> str:
  own = () if arm is None else arm.settings
  parts = [] if arm is None else [arm.name]
  parts += [
    f"{_short(n)}={_text(config_lib.value(whole, n))}"
    for n in overrides
    if n not in own
  ]
  return ",".join(parts) or "base"


def _short(name: str) -> str:
  """Returns the last part of a setting's name, or all of it where others end alike."""
  leaf = name.split(".")[-1]
  alike = [n for n in config_lib.names() if n.split(".")[-1] == leaf]
  return leaf if len(alike) == 1 else name


def _text(value) -> str:
  if isinstance(value, config_lib.Pair) and value.height == value.width:
    return str(value.height)
  if isinstance(value, tuple):
    return "-".join(_text(part) for part in value)
  if isinstance(value, float):
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
  return str(value).replace(" ", "_")


def groups(chosen: Sequence[Trial], one_seed: bool = False) -> list[Group]:
  """Puts trials that share a program together.

  Args:
    chosen: trials, in the order in which they are to run.
    one_seed: whether members must have the same seed, as those do that stream data.
  """
  together = {}
  for trial in chosen:
    program = _program(trial.config)
    seed = trial.config.seed if one_seed else None
    together.setdefault((json.dumps(program, sort_keys=True), seed), []).append(trial)
  return [_group(key, tuple(members)) for key, members in together.items()]


def _program(config: Config) -> dict[str, Any]:
  """Returns the settings that are fixed in the compiled program, and by which parts
  that are left out where they are 0 (`train.LEFT_OUT`) are in it."""
  fixed = {
    name: config_lib.value(config, name)
    for name in config_lib.names()
    if name not in train.TRACED
  }
  on = {name: bool(config_lib.value(config, name)) for name in train.LEFT_OUT}
  return config_lib.plain(fixed) | {"on": on}


def _group(key, members: tuple[Trial, ...]) -> Group:
  names = "\n".join(trial.name for trial in members)
  digest = hashlib.sha256(f"{key}\n{names}".encode()).hexdigest()[:8]
  arms = {trial.arm for trial in members}
  (arm,) = arms if len(arms) == 1 else (None,)
  label = re.sub(r"[^A-Za-z0-9_.-]+", "_", arm or "group").strip("._") or "group"
  return Group(f"{label[:40]}-{digest}", members[0].config, members)


def to_json(base: Config, made: Sequence[Group]) -> dict[str, Any]:
  """Returns the content of sweep.json."""
  return {
    "schema": SCHEMA,
    "base": config_lib.to_dict(base),
    "groups": [
      {
        "id": group.id,
        "facts": dict(group.facts),
        "trials": [
          {"name": t.name, "arm": t.arm, "overrides": dict(t.overrides)}
          for t in group.trials
        ],
      }
      for group in made
    ],
  }


def from_json(content: Mapping[str, Any]) -> tuple[Config, list[Group]]:
  """Returns the base and the groups that `to_json` wrote down."""
  base = config_lib.parse(content["base"])
  made = []
  for group in content["groups"]:
    members = tuple(
      Trial(
        t["name"],
        t["arm"],
        t["overrides"],
        config_lib.override(base, t["overrides"]),
      )
      for t in group["trials"]
    )
    made.append(Group(group["id"], members[0].config, members, group["facts"]))
  return base, made


def extended(
  old: Sequence[Group], chosen: Sequence[Trial], one_seed: bool
) -> list[Group]:
  """Returns the groups of a sweep that goes on: those of before as they are, and new
  ones of the trials that are new.

  Raises:
    ConfigError: a trial of before is gone, or is another one now.
  """
  now = {trial.name: trial for trial in chosen}
  wrong = []
  for before in (trial for group in old for trial in group.trials):
    trial = now.pop(before.name, None)
    if trial is None:
      wrong.append(f"trial {before.name!r} is gone")
      continue
    changed = train.differences(before.config, trial.config)
    if changed:
      wrong.append(f"trial {before.name!r}: {', '.join(changed)}")
  if wrong:
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise ConfigError(
      f"this folder holds another sweep: {'; '.join(wrong[:3])}{more}; try another "
      "--workdir"
    )
  return [*old, *groups(list(now.values()), one_seed)]

"""Filters for groups and rollouts by name, as in the page's address; ``page/filters.js`` has the same filters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from rllm_core.errors import ConfigError
from rllm_viewer.view.facts import ListedGroup, ListedRollout

Holds = Callable[[ListedGroup, ListedRollout, str], bool]

SOLVED = {"yes": True, "no": False, "unknown": None}
_RANGE = re.compile(r"\s*(-?[\d.]*?\d?)\s*(?:(\.\.)\s*(-?[\d.]*))?\s*", re.ASCII)


def _in_range(text: str, low: float | None, high: float | None) -> bool:
    bounds = range_of(text)
    return bounds is not None and low is not None and high is not None and high >= bounds[0] and low <= bounds[1]


def _has_break(rollout: ListedRollout, wanted: str) -> bool:
    if wanted in ("any", "none"):
        return bool(rollout.breaks) == (wanted == "any")
    return wanted in rollout.breaks


FILTERS: dict[str, Holds] = {
    "steps": lambda group, rollout, wanted: _in_range(wanted, group.step, group.step),
    "outcome": lambda group, rollout, wanted: rollout.outcome == wanted,
    "reason": lambda group, rollout, wanted: wanted in (group.reason, rollout.reason, rollout.end),
    "solved": lambda group, rollout, wanted: rollout.solved is SOLVED[wanted],
    "reward": lambda group, rollout, wanted: _in_range(wanted, rollout.reward, rollout.reward),
    "tokens": lambda group, rollout, wanted: _in_range(wanted, rollout.tokens, rollout.tokens),
    "version": lambda group, rollout, wanted: bool(rollout.versions) and _in_range(wanted, *rollout.versions),
    "role": lambda group, rollout, wanted: wanted in rollout.roles,
    "tool": lambda group, rollout, wanted: bool(rollout.tools) if wanted == "any" else wanted in rollout.tools,
    "break": lambda group, rollout, wanted: _has_break(rollout, wanted),
    "cut": lambda group, rollout, wanted: rollout.cut == (wanted == "yes"),
    "kept": lambda group, rollout, wanted: group.kept == wanted,
    "task": lambda group, rollout, wanted: wanted.lower() in group.task.lower(),
}
RANGES = ("steps", "reward", "tokens", "version")
CHOICES = {"solved": tuple(SOLVED), "cut": ("yes", "no")}


def range_of(text: str) -> tuple[float, float] | None:
    """Returns the bounds of a text such as ``3..9``, ``3..`` or ``..9``; None if it is not a range."""
    match = _RANGE.fullmatch(text)
    if match is None or (not match[1] and not match[3]):
        return None
    try:
        low = float(match[1]) if match[1] else -math.inf
        high = low if not match[2] else float(match[3]) if match[3] else math.inf
    except ValueError:
        return None
    return low, high


def parsed(written: Sequence[str]) -> dict[str, str]:
    """Returns filters of the form ``name=value`` by name.

    Raises:
        ConfigError: If a name or a value is not allowed.
    """
    found: dict[str, str] = {}
    for text in written:
        name, equals, value = text.partition("=")
        if not equals or name not in FILTERS:
            raise ConfigError(f"--filter {text!r} must be NAME=VALUE, where NAME is one of {', '.join(FILTERS)}")
        if name in RANGES and range_of(value) is None:
            raise ConfigError(f"--filter {text!r}: {name} takes a number or a range such as 3..9, 3.. or ..9")
        if value not in CHOICES.get(name, (value,)):
            raise ConfigError(f"--filter {text!r}: {name} must be one of {', '.join(CHOICES[name])}")
        found[name] = value
    return found


def fitting(group: ListedGroup, wanted: dict[str, str]) -> list[int]:
    """Returns the positions of a group's rollouts that pass all filters; empty if its line cannot be read."""
    return [
        position
        for position, rollout in enumerate(group.rollouts or ())
        if all(FILTERS[name](group, rollout, value) for name, value in wanted.items())
    ]

"""Our own fields in the places that formats leave to their users, under key ``rllm_core``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.run_folder.groups import MEASURES
from rllm_core.types import Step
from rllm_viewer.travel.contract import Imported
from rllm_viewer.travel.fields import GROUP, changed, json_of
from rllm_viewer.travel.selection import Picked

KEY = "rllm_core"
PER_STEP = {name: name for name in MEASURES} | {"advantages": "trained_advantages"}  # a step has advantages of its own


def about(one: Picked, number: int | None, *left_out: str) -> dict[str, Any]:
    """Returns everything about a rollout and one of its trajectories, except the steps.

    Args:
        one: The rollout.
        number: Number of the trajectory; None for a rollout without any.
        left_out: Episode fields that the format stores elsewhere.
    """
    group, rollout = one.group, one.rollout
    found: dict[str, Any] = {
        "task": {"task_id": group.task.task_id, "data": json_of(group.task.data)},
        "group": {name: getattr(group, name) for name in GROUP},
        "rollout": {"outcome": rollout.outcome, "reason": rollout.reason, **changed(rollout.episode, *left_out)},
    }
    found["rollout"] |= {f"has_{name}": True for name in PER_STEP if getattr(rollout, name)}
    if number is not None:
        found["trajectory"] = {"number": number, **changed(rollout.episode.trajectories[number])}
    return found


def about_step(one: Picked, number: int, position: int, *left_out: str) -> dict[str, Any]:
    """Returns the fields of a step that differ from their defaults, with its training data.

    Args:
        one: The rollout.
        number: Number of the trajectory.
        position: Position of the step in it.
        left_out: Fields that the format stores elsewhere.
    """
    step: Step = one.rollout.episode.trajectories[number].steps[position]
    found = changed(step, *left_out)
    for name, key in PER_STEP.items():
        per_trajectory: Sequence[Any] = getattr(one.rollout, name)
        if key not in left_out and per_trajectory and (numbers := per_trajectory[number][position]) is not None:
            found[key] = json_of(numbers)
    return found


def read_into(imported: Imported, found: Any) -> None:
    """Adds the fields that `about` wrote to an imported row."""
    if not isinstance(found, Mapping):
        return
    for name in ("task", "group", "rollout", "trajectory"):
        if isinstance(found.get(name), Mapping):
            getattr(imported, name).update(found[name])

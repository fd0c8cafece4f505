"""Columns of dataset rows that describe a row's rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.types import Step, Trajectory
from rllm_viewer.travel.contract import Imported, Located, Row
from rllm_viewer.travel.fields import Losses, json_of
from rllm_viewer.travel.selection import Picked

HOLDS = frozenset(
    {
        "task.task_id",
        "task.data",
        "group.step",
        "group.group",
        "group.kept",
        "rollout.outcome",
        "rollout.reason",
        "episode.rollout_id",
        "episode.rollout_index",
        "episode.is_correct",
        "episode.is_validation",
        "episode.termination_reason",
        "trajectory.role",
        "trajectory.reward",
    }
)
EPISODE = ("rollout_id", "rollout_index", "is_correct", "is_validation", "termination_reason")
NAMES = ("task_id", "task", "step", "group", "kept", "outcome", "reason", *EPISODE, "role", "reward", "trajectory")
UNHELD = "trajectory (not trained, or without a model call)"


def of_rollout(one: Picked, number: int, trajectory: Trajectory) -> Row:
    """Returns the columns that all rows of a trajectory share. ``task`` is JSON text: its keys differ between rows."""
    group, episode = one.group, one.rollout.episode
    return {
        "task_id": group.task.task_id,
        "task": json.dumps(json_of(group.task.data), ensure_ascii=False),
        "step": group.step,
        "group": group.group,
        "kept": group.kept,
        "outcome": one.rollout.outcome,
        "reason": one.rollout.reason,
        **{name: json_of(getattr(episode, name)) for name in EPISODE},
        "role": trajectory.role,
        "reward": trajectory.reward,
        "trajectory": number,
    }


def trained(one: Picked, losses: Losses) -> list[tuple[int, Trajectory]]:
    """Returns the trajectories that a training format can hold, by number; counts the others."""
    found = list(enumerate(one.rollout.episode.trajectories))
    kept = [(number, trajectory) for number, trajectory in found if trajectory.trainable and trajectory.steps]
    losses.add(UNHELD, len(found) - len(kept))
    if not found:
        losses.add("rollout (without a model call)")
    return kept


def question(messages: Sequence[Mapping[str, Any]], step: Step, data: Mapping[str, Any]) -> Row:
    """Returns the columns of workflow ``dataset``: the last question, and the task's or the model's answer."""
    asked = [message for message in messages if message["role"] == "user" and isinstance(message.get("content"), str)]
    answer = data.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        answer = step.text
    return {"question": asked[-1]["content"] if asked else None, "answer": str(answer) or None}


def read_into(imported: Imported, located: Located) -> None:
    """Adds the facts about the rollout from these columns.

    Raises:
        ConfigError: If column ``task`` is not JSON.
    """
    row = located.row
    if "task_id" in row:
        imported.task["task_id"] = row["task_id"]
    if "task" in row:
        imported.task["data"] = json_column(located, "task", dict)
    for name in ("step", "group", "kept"):
        if row.get(name) is not None:
            imported.group[name] = row[name]
    for name in ("outcome", "reason", *EPISODE):
        if row.get(name) is not None:
            imported.rollout[name] = row[name]
    for name in ("role", "reward"):
        if row.get(name) is not None:
            imported.trajectory[name] = row[name]
    if "trajectory" in row:
        imported.trajectory["number"] = row["trajectory"]


def json_column(located: Located, name: str, kind: type) -> Any:
    """Returns a column that may be JSON text; empty if it is absent.

    Raises:
        ConfigError: If the column has another type.
    """
    value = located.row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{located.where}: {name} is text that is not JSON: {error}") from error
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{located.where}: {name} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def messages_of(located: Located, name: str) -> list[dict[str, Any]]:
    """Returns a column of messages.

    Raises:
        ConfigError: If an entry is not a message.
    """
    found: list[dict[str, Any]] = json_column(located, name, list)
    for position, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{located.where}: {name}[{position}] is not a message with a role")
    return found

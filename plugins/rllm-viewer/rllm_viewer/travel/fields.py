"""The fields of a rollout by name, and the fields that a format loses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cache
from typing import Any

import numpy as np
from pydantic_core import PydanticUndefined

from rllm_core.records import Record
from rllm_core.run_folder.groups import MEASURES
from rllm_core.types import Episode, Step, Trajectory, thaw
from rllm_viewer.travel.selection import Picked

GROUP = ("step", "group", "kept")
ROLLOUT = ("outcome", "reason", *MEASURES)
RECORDS: Mapping[str, tuple[type[Record], tuple[str, ...]]] = {
    "episode": (Episode, ("trajectories", "task_id")),
    "trajectory": (Trajectory, ("steps",)),
    "step": (Step, ("step_id",)),
}
"""Records by kind, each with fields that are left out: its parts, and ids that are new in each copy."""


def fields_of(kind: str, *left_out: str) -> frozenset[str]:
    """Returns the names of all fields of a kind, such as ``step.logprobs`` of ``step``."""
    if kind in RECORDS:
        record, own = RECORDS[kind]
        names: Sequence[str] = [name for name in record.model_fields if name not in own]
    else:
        names = {"group": GROUP, "rollout": ROLLOUT, "task": ("task_id", "data")}[kind]
    return frozenset(f"{kind}.{name}" for name in names if name not in left_out)


ALL = frozenset().union(*map(fields_of, ("task", "group", "rollout", "episode", "trajectory", "step")))
TEXT = frozenset({"step.messages", "step.response", "step.tools"})
TOKENS = frozenset({"step.prompt_ids", "step.completion_ids"})


def values(one: Picked) -> Iterator[tuple[str, Any]]:
    """Yields every field of a rollout that differs from its default, once per record that has it."""
    group, rollout = one.group, one.rollout
    named = [("task", group.task, ("task_id", "data")), ("group", group, GROUP), ("rollout", rollout, ROLLOUT)]
    for kind, record, names in named:
        for name in names:
            value = getattr(record, name)
            if value is not None and not (isinstance(value, Sized) and len(value) == 0):
                yield f"{kind}.{name}", value
    yield from _of_record("episode", rollout.episode)
    for trajectory in rollout.episode.trajectories:
        yield from _of_record("trajectory", trajectory)
        for step in trajectory.steps:
            yield from _of_record("step", step)


class Losses:
    """Counts by kind what an export or import loses.

    Attributes:
        counts: Number of fields, messages or rollouts by kind, such as ``step.logprobs``.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, count: int = 1) -> None:
        """Counts something lost."""
        if count:
            self.counts[kind] += count

    def of_rollout(self, one: Picked, holds: frozenset[str]) -> None:
        """Counts the fields of a rollout that a format does not hold."""
        self.counts.update(name for name, _ in values(one) if name not in holds)

    def unread(self, where: str, row: Mapping[str, Any], known: Sequence[str]) -> None:
        """Counts what a third-party document holds beyond the known keys."""
        for key, value in row.items():
            if key not in known and value not in (None, False, "", [], {}):
                self.counts[f"{where}.{key}"] += 1


def changed(record: Record, *left_out: str) -> dict[str, Any]:
    """Returns the fields of a record that differ from their default, as JSON data."""
    kind = next(kind for kind, (model, _) in RECORDS.items() if isinstance(record, model))
    named = dict(_of_record(kind, record))
    return {
        name: json_of(named[f"{kind}.{name}"])
        for name in type(record).model_fields
        if f"{kind}.{name}" in named and name not in left_out
    }


def json_of(value: Any) -> Any:
    """Returns a record's value as JSON data; numbers have the fewest digits that restore the float32."""
    if isinstance(value, np.ndarray):
        return [float(str(number)) for number in value] if value.dtype == np.float32 else value.tolist()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Record):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [json_of(part) for part in value]
    return thaw(value)


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON data, regardless of key order."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _of_record(kind: str, record: Record) -> Iterator[tuple[str, Any]]:
    _, own = RECORDS[kind]
    for name in type(record).model_fields:
        if name in own:
            continue
        value = getattr(record, name)
        is_array = hasattr(value, "tolist") and isinstance(value, Sized)
        if (is_array and len(value)) or (not is_array and _differs(type(record), name, value)):
            yield f"{kind}.{name}", value


def _differs(kind: type[Record], name: str, value: Any) -> bool:
    if isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0:
        return False
    return bool(value != _default(kind, name))


@cache
def _default(kind: type[Record], name: str) -> Any:
    default = kind.model_fields[name].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default

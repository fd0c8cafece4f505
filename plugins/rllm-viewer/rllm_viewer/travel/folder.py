"""Writes imported rollouts as a run folder that ``show`` can open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rllm_core.config import to_toml
from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder import recorded
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.types import Episode, Floats, Step, Task, Trajectory
from rllm_viewer.travel.contract import Imported
from rllm_viewer.travel.fields import GROUP, Losses
from rllm_viewer.travel.rllm_extra import PER_STEP

IMPORTED = "imported"
"""Status of an imported folder; outcome, reason and ``kept`` of groups whose file does not name them."""


@dataclass
class _FolderTrajectory:
    fields: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _FolderRollout:
    where: str
    fields: dict[str, Any]
    trajectories: dict[Any, _FolderTrajectory] = field(default_factory=dict)


@dataclass
class _Group:
    where: str
    task: dict[str, Any]
    fields: dict[str, Any]
    rollouts: dict[Any, _FolderRollout] = field(default_factory=dict)


def groups_of(found: Iterable[Imported], losses: Losses) -> Iterator[RecordedGroup]:
    """Yields the groups of imported rows, in the order of their first rows.

    Raises:
        ConfigError: If a row has a value that no record can hold.
    """
    groups: dict[Any, _Group] = {}
    for number, one in enumerate(found):
        together = json.dumps([one.group, one.task.get("task_id")]) if one.group else one.together
        group = groups.setdefault(number if together is None else together, _Group(one.where, one.task, one.group))
        known = one.rollout.get("rollout_id")
        key = known or (number if "rollout_index" not in one.rollout else ("at", one.rollout["rollout_index"]))
        rollout = group.rollouts.setdefault(key, _FolderRollout(one.where, one.rollout))
        if one.steps or "number" in one.trajectory:
            fields = {name: value for name, value in one.trajectory.items() if name not in ("number", "part")}
            trajectory = rollout.trajectories.setdefault(
                one.trajectory.get("number", ("row", number)), _FolderTrajectory(fields)
            )
            trajectory.steps += one.steps
    for group in groups.values():
        yield _recorded(group, losses)


def _recorded(group: _Group, losses: Losses) -> RecordedGroup:
    try:
        task = Task(**{"task_id": Path(group.where).name[:512], **group.task})
        rollouts = [_rollout(rollout, index, task, losses) for index, rollout in enumerate(group.rollouts.values())]
        versions = [one.episode.weight_version for one in rollouts if one.episode.weight_version is not None]
        outcomes = {(one.outcome, one.reason) for one in rollouts}
        outcome, reason = outcomes.pop() if len(outcomes) == 1 else (rollouts[0].outcome, rollouts[0].reason)
        fields = {"step": 0, "group": None, "kept": IMPORTED} | {
            name: value for name, value in group.fields.items() if name in GROUP
        }
        if not isinstance(fields["step"], int) or not isinstance(fields["group"], int | None):
            raise ValueError(f"step {fields['step']!r} and group {fields['group']!r} must be integers")
        return RecordedGroup(
            **fields,
            task=task,
            outcome=outcome,
            reason=reason,
            weight_version=min(versions, default=None),
            rollouts=rollouts,
        )
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"{group.where} cannot be imported: {' '.join(str(error).split())}") from error


def _rollout(rollout: _FolderRollout, index: int, task: Task, losses: Losses) -> RecordedRollout:
    fields = {"rollout_index": index, **rollout.fields}
    outcome, reason = fields.pop("outcome", IMPORTED), fields.pop("reason", IMPORTED)
    kept = [name for name in PER_STEP if fields.pop(f"has_{name}", False)]
    numbers: dict[str, list[list[Any]]] = {name: [] for name in kept}
    trajectories = []
    for trajectory in rollout.trajectories.values():
        steps = []
        for number in numbers.values():
            number.append([])
        for written in trajectory.steps:
            step = _step(written, losses)
            for name, key in PER_STEP.items():
                trained = written.get(key)
                if name in numbers:
                    numbers[name][-1].append(None if trained is None else _array(trained, step, name))
                elif trained is not None:
                    losses.add(f"step.{key}")
            steps.append(step)
        trajectories.append(Trajectory(**trajectory.fields, steps=steps))
    episode = Episode(task_id=task.task_id, trajectories=trajectories, **fields)
    return RecordedRollout(episode, outcome, reason, **numbers)


def _step(written: Mapping[str, Any], losses: Losses) -> Step:
    fields = {name: value for name, value in written.items() if name not in PER_STEP.values()}
    if fields.get("logprobs") is not None and len(fields["logprobs"]) != len(fields["completion_ids"]):
        losses.add("step.logprobs (without the ids of their tokens)")
        del fields["logprobs"]
    return Step(**fields)


def _array(numbers: Any, step: Step, name: str) -> Floats:
    array = np.asarray(numbers, np.float32)
    if array.shape != (len(step.completion_ids),) or not np.isfinite(array).all():
        raise ValueError(f"{name} must be one finite number per token of the completion")
    return array


def write(folder: Path, source: Path, kind: str, groups: Iterable[RecordedGroup]) -> tuple[int, int]:
    """Writes a run folder, which appears once it is complete.

    Args:
        folder: Output folder, new or empty.
        source: File that was imported.
        kind: Format of the file.
        groups: The groups.

    Returns:
        Number of groups and of rollouts.

    Raises:
        ConfigError: If the folder is not empty, or there are no groups.
        RunError: If the disk rejects a write.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another one")
    partial = folder.resolve().with_name(f".{folder.resolve().name}.partial")
    if partial.exists():
        raise ConfigError(f"{partial} exists: another import is running or was interrupted. If none is, remove it")
    try:
        partial.mkdir(parents=True)
        try:
            counts = _write(partial, source, kind, groups)
            if not counts[0]:
                raise ConfigError(f"{source} has no rows")
            partial.rename(folder.resolve())
        except BaseException:
            shutil.rmtree(partial)
            raise
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror or error}") from error
    return counts


def _write(folder: Path, source: Path, kind: str, groups: Iterable[RecordedGroup]) -> tuple[int, int]:
    tables = {"workflow": IMPORTED, "backend": IMPORTED, "training": {"groups_kept_per_step": 1}}
    (folder / "run.toml").write_text(to_toml(tables), encoding="utf-8")
    offset, count, rollouts = 0, 0, 0
    with (
        (folder / f"{recorded.GROUPS}.jsonl").open("wb") as lines,
        (folder / f"{recorded.INDEX}.jsonl").open("w", encoding="utf-8") as index,
    ):
        for group in groups:
            line = group.to_json().encode()
            lines.write(line + b"\n")
            index.write(json.dumps(IndexedGroup.of(group, offset, len(line)).to_json()) + "\n")
            offset += len(line) + 1
            count += 1
            rollouts += len(group.rollouts)
    summary = {"status": IMPORTED, "imported": {"file": source.name, "format": kind}, "groups": count}
    (folder / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    return count, rollouts

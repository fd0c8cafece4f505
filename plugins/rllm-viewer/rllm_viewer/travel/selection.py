"""Selects the recorded rollouts that a user wants to export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup, group_at
from rllm_core.text import counted
from rllm_viewer import recordings
from rllm_viewer.results import is_running

Split = Literal["training", "validation"]


@dataclass(frozen=True)
class Picked:
    """A rollout with its group."""

    group: RecordedGroup
    rollout: RecordedRollout


@dataclass(frozen=True)
class Filters:
    """Filters for rollouts; None or False disables a filter.

    Attributes:
        best: Only the rollout of each group with the highest reward; the first of equals.
        solved: Only rollouts with ``is_correct``.
        reward_above: Only rollouts with a higher reward.
        steps: First and last step; None leaves that end open.
        task: Only rollouts of this task.
        split: Only rollouts of training, or only of validations.
    """

    best: bool = False
    solved: bool = False
    reward_above: float | None = None
    steps: tuple[int | None, int | None] = (None, None)
    task: str | None = None
    split: Split | None = None

    def has_group(self, entry: IndexedGroup) -> bool:
        """Whether rollouts of a recorded group can be chosen."""
        first, last = self.steps
        return (
            (first is None or entry.step >= first)
            and (last is None or entry.step <= last)
            and self.task in (None, entry.task)
            and (self.split is None or (entry.outcome == "validation") == (self.split == "validation"))
        )

    def rollouts_of(self, group: RecordedGroup) -> Sequence[RecordedRollout]:
        """Returns the chosen rollouts of a group."""
        found = [
            rollout
            for rollout in group.rollouts
            if (not self.solved or rollout.episode.is_correct)
            and (self.reward_above is None or (rollout.reward is not None and rollout.reward > self.reward_above))
        ]
        if self.best:
            return (
                [max(rewarded, key=_reward)] if (rewarded := [one for one in found if one.reward is not None]) else []
            )
        return found


def picked(run: Path, filters: Filters) -> Iterator[Picked]:
    """Yields the chosen rollouts of a run, oldest first; from an active run, those recorded so far.

    Raises:
        ConfigError: If the folder is not a run folder, or has no recorded group.
        RunError: If a line is damaged.
    """
    for entry in complete_entries(run):
        if filters.has_group(entry):
            group = group_at(run, entry)
            for rollout in filters.rollouts_of(group):
                yield Picked(group, rollout)


def complete_entries(run: Path) -> list[IndexedGroup]:
    """Returns the index entries of all recorded groups whose lines are complete.

    Raises:
        RunError: If the run has ended and lines are missing; in an active or killed run, the last ones may be.
    """
    entries, file = recordings.index_of(run), run / "groups.jsonl"
    size = file.stat().st_size if file.is_file() else 0
    complete = [entry for entry in entries if entry.offset + entry.length <= size]
    if len(complete) < len(entries) and state_of(run) is None:
        missing = counted(len(entries) - len(complete), "group")
        raise RunError(f"{file} is damaged: it lacks {missing} of groups_index.jsonl; restore the file from a copy")
    return complete


def state_of(run: Path) -> str | None:
    """Returns a remark that more rollouts may come, or that the run was killed; None for an ended run."""
    if (run / "summary.json").is_file():
        return None
    return "the run is going on: these are its rollouts so far" if is_running(run) else "the run was interrupted"


def steps_of(text: str) -> tuple[int | None, int | None]:
    """Reads ``7``, ``7-9``, ``7-`` or ``-9``.

    Raises:
        ConfigError: If the text has another form.
    """
    first, dash, last = text.strip().partition("-")
    ends = [part.strip() for part in ((first, last) if dash else (first, first))]
    if not any(ends) or not all(end == "" or (end.isascii() and end.isdigit()) for end in ends):
        raise ConfigError(f"steps {text!r} must be a step or a range, such as 40, 40-60 or 40-")
    begin, end = (int(part) if part else None for part in ends)
    return begin, end


def _reward(rollout: RecordedRollout) -> float:
    return rollout.reward or 0.0

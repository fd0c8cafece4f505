"""Reads the recorded groups of a run folder: an index of all groups, and single groups without reading the others.

::

    groups.jsonl          one `RecordedGroup` per line
    groups_index.jsonl    one `IndexedGroup` per line, in the same order
    group_timings.jsonl   seconds of the calls of each recorded rollout, one line per rollout
    tokens.jsonl          text of every token id in ``groups.jsonl``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rllm_core.errors import RunError
from rllm_core.run_folder.groups import RecordedGroup, mean
from rllm_core.run_folder.journal import damaged, read_json_lines

GROUPS = "groups"
INDEX = "groups_index"
TIMINGS = "group_timings"
TOKENS = "tokens"
COSTS = "costs"


@dataclass(frozen=True)
class IndexedGroup:
    """Index entry: the position of a group, and the fields that readers select groups by.

    Attributes:
        offset: Position of the group's line in ``groups.jsonl``, in bytes.
        length: Length of the line in bytes, without the newline.
        step: See `RecordedGroup`, also for attributes that are not listed here.
        task: Id of the group's task.
        kept: Why the group was recorded, such as ``best``.
        rewards: ``(rollouts,)`` mean total reward of each rollout's trajectories; None for a rollout without rewards.
        solved: ``(rollouts,)`` whether each rollout is correct; None where unknown.
    """

    offset: int
    length: int
    step: int
    group: int | None
    task: str
    kept: str
    outcome: str
    reason: str
    rewards: Sequence[float | None]
    solved: Sequence[bool | None]

    @classmethod
    def of(cls, group: RecordedGroup, offset: int, length: int) -> IndexedGroup:
        """Describes a group whose line is at ``offset``."""
        return cls(
            offset,
            length,
            group.step,
            group.group,
            group.task.task_id,
            group.kept,
            group.outcome,
            group.reason,
            [rollout.reward for rollout in group.rollouts],
            [rollout.episode.is_correct for rollout in group.rollouts],
        )

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of the rollouts that have one, or None."""
        return mean(self.rewards)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON data, for its line."""
        return dict(self.__dict__)


def index_of(run: Path) -> list[IndexedGroup]:
    """Returns the entries of all groups recorded so far in a run folder, oldest first.

    Raises:
        DamagedFile: If the index is damaged.
    """
    path, groups = run / f"{INDEX}.jsonl", run / f"{GROUPS}.jsonl"
    try:
        entries = [IndexedGroup(**line) for line in read_json_lines(path)]
    except TypeError as error:
        raise damaged(path, error) from error
    if not entries and groups.is_file():
        with groups.open("rb") as lines:
            # One may lack its entry: a run writes a group before the entry, and may be killed between them.
            if len(list(islice(lines, 2))) > 1:
                raise damaged(path, ValueError(f"it is missing or empty, but {groups.name} has groups"))
    if (run / "summary.json").exists():
        return entries
    # Whoever copies the folder of an active run may copy the groups earlier than their index.
    size = groups.stat().st_size if groups.is_file() else 0
    return [entry for entry in entries if entry.offset + entry.length <= size] or entries


def group_at(run: Path, entry: IndexedGroup) -> RecordedGroup:
    """Reads one group.

    Raises:
        RunError: If the group is not at the entry's position in the file.
    """
    path = run / f"{GROUPS}.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            return RecordedGroup.from_json(file.read(entry.length))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} has no readable group at byte {entry.offset}: {error}") from error


def texts_of_tokens(run: Path) -> dict[int, str]:
    """Returns the text of every token id in the recorded groups; empty if the run has no ``tokens.jsonl``."""
    return {line["id"]: line["text"] for line in read_json_lines(run / f"{TOKENS}.jsonl")}


def timings_of(run: Path) -> dict[str, dict[str, Any]]:
    """Returns each rollout's line in ``group_timings.jsonl``, by rollout id."""
    return {line["rollout"]: line for line in read_json_lines(run / f"{TIMINGS}.jsonl")}

"""The first failure of every kind in full: what a person wants to read when the command ends, and not scroll for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllm_core.types import Episode

MAX_KINDS = 50
SHOWN_KINDS = 5


class FirstFailures:
    """Counts failures by kind and keeps the first of each; those that differ in numbers only are of one kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], dict[str, Any]] = {}

    def rollout(self, episode: Episode) -> None:
        """Take note of an episode with an error."""
        self.add(
            episode.termination_reason.value, episode.error or "", f"rollout {episode.rollout_id}", episode.task_id
        )

    def add(self, reason: str, error: str, where: str | None = None, task: str | None = None, count: int = 1) -> None:
        """Take note of a failure.

        Args:
            reason: A reason why rollouts end, or ``observer`` or ``tracker``.
            error: What went wrong.
            where: In what.
            task: Id of the task.
            count: How often.
        """
        kind = (reason, re.sub(r"\d+", "0", error))
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = (reason, "")  # whoever writes the message anew each time does not fill the memory
        first = {"reason": reason, "count": 0, "error": error, "task": task, "where": where}
        self._kinds.setdefault(kind, first)["count"] += count

    def to_list(self) -> list[dict[str, Any]]:
        """As it stands in ``summary.json``, the most frequent first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind["count"])


def of_episodes(episodes: Iterable[Episode]) -> list[dict[str, Any]]:
    """The first failures among episodes."""
    failures = FirstFailures()
    for episode in episodes:
        if episode.error is not None:
            failures.rollout(episode)
    return failures.to_list()


def lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the command says at its end."""
    said = []
    for failure in failures[:SHOWN_KINDS]:
        task = f"task {failure['task']}, " if failure["task"] is not None else ""
        first = f" (the first: {task}{failure['where']})" if failure["where"] is not None else ""
        said.append(f"failed, {failure['count']} x {failure['reason']}: {failure['error']}{first}")
    if len(failures) > SHOWN_KINDS:
        said.append(f"{len(failures) - SHOWN_KINDS} more kinds of failure; summary.json has the first of each")
    return said

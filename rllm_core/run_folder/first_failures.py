"""First failure of every kind in full, to print when the command ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllm_core.types import Episode

MAX_KINDS = 50
SHOWN_KINDS = 5
# Numbers and ids, and texts in quotes, which are no apostrophes; a text that was cut short has no closing quote.
_VARIES = re.compile(r"""\w*\d\w*|(?<!\w)(['"]).*?(\1(?!\w)|$)""", re.DOTALL)


class FirstFailures:
    """Counts failures by kind and keeps the first of each.

    Failures that differ only in numbers, ids or quoted text, such as the reply of a server, are one kind.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], dict[str, Any]] = {}

    def rollout(self, episode: Episode) -> None:
        """Records an episode with an error."""
        self.add(
            episode.termination_reason.value, episode.error or "", f"rollout {episode.rollout_id}", episode.task_id
        )

    def episodes(self, episodes: Iterable[Episode]) -> None:
        """Records the errors among episodes."""
        for episode in episodes:
            if episode.error is not None:
                self.rollout(episode)

    def add(self, reason: str, error: str, where: str | None = None, task: str | None = None, count: int = 1) -> None:
        """Records a failure. ``reason`` is a termination reason, ``observer``, ``tracker`` or ``unscored``."""
        kind = (reason, _VARIES.sub("0", error))
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = (reason, "")  # limits memory if every message is different
        first = {"reason": reason, "count": 0, "error": error, "task": task, "where": where}
        self._kinds.setdefault(kind, first)["count"] += count

    def to_list(self) -> list[dict[str, Any]]:
        """Returns the content for ``summary.json``, most frequent first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind["count"])


def lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats the failures for the end of the command."""
    said = []
    for failure in failures[:SHOWN_KINDS]:
        task = f"task {failure['task']}, " if failure["task"] is not None else ""
        first = f" (the first: {task}{failure['where']})" if failure["where"] is not None else ""
        said.append(f"failed, {failure['count']} x {failure['reason']}: {failure['error']}{first}")
    if len(failures) > SHOWN_KINDS:
        said.append(f"{len(failures) - SHOWN_KINDS} more kinds of failure; summary.json has the first of each")
    return said

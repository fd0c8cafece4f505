"""Difficulty of the tasks for the policy: how many rollouts of each group solved the group's task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rllm_core.types import Episode

NONE, SOME, ALL = "groups_solved_by_none", "groups_solved_by_some", "groups_solved_by_all"


class DifficultyCounts:
    """Counts groups by how many of their rollouts solved the task.

    Includes the groups filtered since the last step: with ``filter_uniform_groups``, in nearly all trained groups only
    some rollouts solve the task, so trained groups alone would not show the difficulty. Groups without ``is_correct``
    are not counted.
    """

    def __init__(self) -> None:
        self._filtered: Counter[str] = Counter()  # since the last step, by metric

    def filtered(self, episodes: Iterable[Episode]) -> None:
        """Counts a filtered group whose rollouts all succeeded."""
        self._filtered.update(_solved_by(episodes))

    def take(self, groups: Iterable[Sequence[Episode]]) -> dict[str, float]:
        """Returns the shares for an optimizer step, by metric; empty if no episode has ``is_correct``."""
        counts, self._filtered = self._filtered, Counter()
        for episodes in groups:
            counts.update(_solved_by(episodes))
        return {name: counts[name] / counts.total() for name in (NONE, SOME, ALL)} if counts else {}

    def state_dict(self) -> dict[str, int]:
        """Returns the state for the manifest."""
        return dict(self._filtered)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the state from the manifest."""
        self._filtered = Counter(state)


def _solved_by(episodes: Iterable[Episode]) -> list[str]:
    """Returns the metric that a group counts toward, as a list of one; empty if none."""
    judged = [episode.is_correct for episode in episodes if episode.is_correct is not None]
    if not judged:
        return []
    return [(ALL if all(judged) else SOME) if any(judged) else NONE]

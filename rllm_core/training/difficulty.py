"""How hard the tasks are for the policy: how many of a group's rollouts solved theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rllm_core.types import Episode

NONE, SOME, ALL = "groups_solved_by_none", "groups_solved_by_some", "groups_solved_by_all"


class Difficulty:
    """Counts the groups that were completed since the last optimizer step by how many of their rollouts solved them.

    Groups that are filtered count as well: with ``filter_uniform_groups`` those that are trained are nearly all solved
    by some. Groups of workflows that do not say ``is_correct``, and those that lost a rollout, do not count.
    """

    def __init__(self) -> None:
        self._solved_by: dict[int, str] = {}  # metric name by ordinal

    def completed(self, ordinal: int, episodes: Iterable[Episode]) -> None:
        """All rollouts of a group have ended well."""
        judged = [episode.is_correct for episode in episodes if episode.is_correct is not None]
        if judged:
            self._solved_by[ordinal] = (ALL if all(judged) else SOME) if any(judged) else NONE

    def forget(self, ordinals: Iterable[int]) -> None:
        """Groups were given up; they will be completed again."""
        for ordinal in ordinals:
            self._solved_by.pop(ordinal, None)

    def take(self) -> dict[str, list[bool]]:
        """Per metric, for each group since the last call, whether it belongs there."""
        solved_by, self._solved_by = list(self._solved_by.values()), {}
        return {name: [by == name for by in solved_by] for name in (NONE, SOME, ALL)}

    def state_dict(self, due: Collection[int]) -> list[tuple[int, str]]:
        """For the manifest, without the groups that are ``due`` again after a restart."""
        return [(ordinal, by) for ordinal, by in self._solved_by.items() if ordinal not in due]

    def load_state_dict(self, state: Iterable[tuple[int, str]]) -> None:
        """From the manifest."""
        self._solved_by = dict(state)

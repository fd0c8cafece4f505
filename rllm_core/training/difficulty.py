"""How hard the tasks are for the policy: how many of a group's rollouts solved theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rllm_core.types import Episode

NONE, SOME, ALL = "groups_solved_by_none", "groups_solved_by_some", "groups_solved_by_all"


class Difficulty:
    """Counts groups by how many of their rollouts solved the task: those of a step, and those filtered before it.

    With ``filter_uniform_groups`` those that are trained are nearly all solved by some; only with the others beside
    them do the shares tell how hard the tasks are. Groups of workflows that do not say ``is_correct`` do not count.
    """

    def __init__(self) -> None:
        self._filtered: Counter[str] = Counter()  # since the last step, by metric

    def filtered(self, episodes: Iterable[Episode]) -> None:
        """A group whose rollouts all ended well is not trained, and another takes its place."""
        self._filtered.update(_solved_by(episodes))

    def take(self, groups: Iterable[Sequence[Episode]]) -> dict[str, float]:
        """The shares of an optimizer step, by metric; none where nobody says what is correct.

        Args:
            groups: The episodes of each group of the step.
        """
        counts, self._filtered = self._filtered, Counter()
        for episodes in groups:
            counts.update(_solved_by(episodes))
        return {name: counts[name] / counts.total() for name in (NONE, SOME, ALL)} if counts else {}

    def state_dict(self) -> dict[str, int]:
        """For the manifest."""
        return dict(self._filtered)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """From the manifest."""
        self._filtered = Counter(state)


def _solved_by(episodes: Iterable[Episode]) -> list[str]:
    """The metric a group counts for, if any."""
    judged = [episode.is_correct for episode in episodes if episode.is_correct is not None]
    if not judged:
        return []
    return [(ALL if all(judged) else SOME) if any(judged) else NONE]

"""``placeholder``: the rank of a rollout among the rollouts of its task."""

from __future__ import annotations

from pydantic import Field
from rllm_core.algorithms.group_scorer import GroupScorer, RolloutGroup, ScorerServices, Scores
from rllm_core.config import Section
from rllm_core.services import Score
from rllm_core.types import Episode


class PlaceholderOptions(Section):
    """``algorithm.group_scorer_options``."""

    length_weight: float = Field(default=0.01, ge=0, description="Reward that a sampled token costs.")


class PlaceholderScorer(GroupScorer):
    """Scores a task's best rollout 1, its worst 0, and the others evenly between; equal rollouts share a rank.

    Rollouts are compared by their own reward minus a cost for their length, so that the scores do not depend on the
    scale of the rewards.
    """

    options_model = PlaceholderOptions
    options: PlaceholderOptions

    async def score(self, group: RolloutGroup, services: ScorerServices) -> Scores:
        """Returns the rank of every rollout that has a reward, and None for the others."""
        values = {episode.rollout_id: self._value(episode) for episode in group.episodes}
        known = sorted(value for value in values.values() if value is not None)
        return {rollout: None if value is None else self._rank(value, known) for rollout, value in values.items()}

    def _value(self, episode: Episode) -> float | None:
        rewarded = [trajectory for trajectory in episode.trajectories if trajectory.has_reward]
        if not rewarded:
            return None
        tokens = sum(len(step.completion_ids) for trajectory in rewarded for step in trajectory.steps)
        return sum(trajectory.total_reward for trajectory in rewarded) - self.options.length_weight * tokens

    @staticmethod
    def _rank(value: float, known: list[float]) -> Score:
        below, equal = sum(other < value for other in known), known.count(value)
        others = len(known) - 1
        return Score((below + (equal - 1) / 2) / others if others else 0.5, {"value": value})

"""``placeholder``: how much better a trajectory did than the others of its group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field
from rllm_core.algorithms.advantages import AdvantageEstimator, Credit
from rllm_core.config import Section
from rllm_core.types import TrajectoryGroup


class PlaceholderOptions(Section):
    """``algorithm.estimator_options`` of ``placeholder``."""

    limit: float = Field(default=3.0, gt=0, description="Maximum distance of an advantage from 0.")


class PlaceholderEstimator(AdvantageEstimator):
    """``(R - median R) / mean |R - median R|`` within the group, clipped to ``[-limit, limit]``; 0 for equal rewards.

    A single reward that is far from the others moves a mean and a standard deviation, but hardly a median.
    """

    options_model = PlaceholderOptions
    options: PlaceholderOptions

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Returns ``(steps,)`` advantages per group and trajectory."""
        return [self._credits(group) for group in groups]

    def _credits(self, group: TrajectoryGroup) -> list[Credit]:
        rewards = np.array([trajectory.total_reward for trajectory in group.trajectories])
        distances = rewards - np.median(rewards)
        scale = np.abs(distances).mean()
        advantages = np.clip(distances / (scale or 1.0), -self.options.limit, self.options.limit)
        return [
            np.full(len(trajectory.steps), advantage)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        ]

"""Advantages from ranks."""

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.config import Section


class RanksOptions(Section):
    """Parameters of ``ranks``."""

    spread: float = Field(default=1.0, gt=0, description="Advantage of the best, and less that of the worst.")


class Ranks(AdvantageEstimator):
    """Ranks of the rewards within the group, equal ones sharing theirs, from ``-spread`` to ``spread``."""

    options_model = RanksOptions
    options: RanksOptions

    def __call__(self, groups):
        return [self._credits(group) for group in groups]

    def _credits(self, group):
        rewards = np.array([trajectory.total_reward for trajectory in group.trajectories])
        better = np.sign(rewards[:, None] - rewards[None, :]).sum(1) / max(1, len(rewards) - 1)
        return [
            np.full(len(trajectory.steps), self.options.spread * value)
            for trajectory, value in zip(group.trajectories, better, strict=True)
        ]

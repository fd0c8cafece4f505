"""Estimators that credit a whole trajectory for its outcome.

``R`` is a trajectory's total reward; ``G`` the number of trajectories in its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Credit, per_step
from rllm_core.algorithms.advantages.contract import rewards as rewards_of
from rllm_core.types import TrajectoryGroup


def _broadcast(group: TrajectoryGroup, values: npt.NDArray[np.float64]) -> list[Credit]:
    return [per_step(trajectory, value) for trajectory, value in zip(group.trajectories, values.tolist(), strict=True)]


class GRPO(AdvantageEstimator):
    """``(R - mean) / (std + 1e-6)`` within the group, with the population standard deviation.

    Source: DeepSeekMath, arXiv 2402.03300, eq. 3 (outcome supervision). A group of equal rewards gets exactly 0.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`."""
        result: list[list[Credit]] = []
        for group in groups:
            rewards = rewards_of(group)
            centred = rewards - rewards.mean()
            uniform = np.ptp(rewards) == 0
            result.append(_broadcast(group, np.zeros_like(rewards) if uniform else centred / (rewards.std() + 1e-6)))
        return result


class RLOO(AdvantageEstimator):
    """``R - mean of the others' R`` within the group: ``G / (G - 1) * (R - mean)``.

    Source: Back to Basics, arXiv 2402.14740, section 4.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`."""
        result: list[list[Credit]] = []
        for group in groups:
            rewards = rewards_of(group)
            result.append(_broadcast(group, (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)))
        return result

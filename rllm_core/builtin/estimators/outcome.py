"""Estimators that compare a trajectory's outcome with its group; all of its tokens get the same advantage.

``R`` is a trajectory's total reward, ``G`` the number of trajectories in its group. Estimators with
a group baseline give exactly 0 to a group of equal rewards, and to a group of one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rllm_core.algorithms.advantages import AdvantageEstimator, Credit
from rllm_core.algorithms.advantages import rewards as rewards_of
from rllm_core.algorithms.statistics import centred, leave_one_out, standardised
from rllm_core.run_file import Section
from rllm_core.types import TrajectoryGroup


class GRPOOptions(Section):
    """``[algorithm.estimator_options]`` of ``grpo``."""

    std: Literal["population", "sample"] = Field(
        default="population", description="Standard deviation with divisor G (rLLM), or G - 1 (verl, TRL)."
    )
    epsilon: float = Field(default=1e-6, ge=0, description="Added to the standard deviation.")


class GRPO(AdvantageEstimator):
    """``(R - mean) / (std + epsilon)`` within the group.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """

    options_model = GRPOOptions
    options: GRPOOptions

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        ddof = int(self.options.std == "sample")
        return [
            broadcast(group, standardised(rewards_of(group), epsilon=self.options.epsilon, ddof=ddof))
            for group in groups
        ]


class DrGRPO(AdvantageEstimator):
    """``R - mean`` within the group, without scaling.

    Use it with ``aggregation = "sequence_mean_token_sum_norm"``, which divides by a constant instead of by lengths.
    Source: Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [broadcast(group, centred(rewards_of(group))) for group in groups]


class RLOO(AdvantageEstimator):
    """``R - mean of the others' R`` within the group: ``G / (G - 1) * (R - mean)``.

    Source: Back to Basics, arXiv 2402.14740, section 4.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [broadcast(group, leave_one_out(rewards_of(group))) for group in groups]


class ReinforceOptions(Section):
    """``[algorithm.estimator_options]`` of ``reinforce``."""

    baseline: float = Field(default=0.0, description="Constant to subtract from every reward.")


class Reinforce(AdvantageEstimator):
    """``R - baseline`` with a constant baseline; a group may have one trajectory.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms", Machine Learning 8 (1992).
    """

    options_model = ReinforceOptions
    options: ReinforceOptions
    min_group_size = 1  # trajectories are not compared

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [broadcast(group, rewards_of(group) - self.options.baseline) for group in groups]


def broadcast(group: TrajectoryGroup, values: npt.NDArray[np.float64]) -> list[Credit]:
    """Repeats each trajectory's value for all of its steps.

    Args:
        group: The trajectories.
        values: ``(trajectories,)``: one value per trajectory.
    """
    return [np.full(len(t.steps), value) for t, value in zip(group.trajectories, values.tolist(), strict=True)]

"""Advantage estimators: what each step of each trajectory is credited with.

``R`` is a trajectory's total reward; ``G`` the number of trajectories in its group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rllm_core.config import AlgorithmConfig
from rllm_core.types import Trajectory, TrajectoryGroup

Advantages = npt.NDArray[np.float64]


class AdvantageEstimator(ABC):
    """Computes advantages for groups of one step.

    Attributes:
        scope: ``group`` if groups are independent of each other, ``batch`` if a group's advantages depend on the
            other groups of the optimizer step; the latter is computed when the whole step is at hand.
        min_group_size: Smallest group it has a baseline for.
    """

    scope: ClassVar[Literal["group", "batch"]] = "group"

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def min_group_size(self) -> int:
        """Groups with fewer trajectories are filtered, and a run configured for fewer is refused."""
        return 2

    @abstractmethod
    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Advantages]]:
        """Advantages per group and trajectory, each an array of shape ``(steps,)``.

        Args:
            groups: One group if the scope is ``group``, those of a whole optimizer step if it is ``batch``.
        """


def _rewards(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
    return np.array([trajectory.total_reward for trajectory in group.trajectories], np.float64)


def _broadcast(group: TrajectoryGroup, values: npt.NDArray[np.float64]) -> list[Advantages]:
    return [
        np.full(len(trajectory.steps), value, np.float64)
        for trajectory, value in zip(group.trajectories, values, strict=True)
    ]


class GRPO(AdvantageEstimator):
    """``(R - mean) / (std + 1e-6)`` within the group, with the population standard deviation.

    Source: DeepSeekMath, arXiv 2402.03300, eq. 3 (outcome supervision). A group of equal rewards gets exactly 0.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Advantages]]:
        """See `AdvantageEstimator`."""
        result = []
        for group in groups:
            rewards = _rewards(group)
            centred = rewards - rewards.mean()
            uniform = np.ptp(rewards) == 0
            result.append(_broadcast(group, np.zeros_like(rewards) if uniform else centred / (rewards.std() + 1e-6)))
        return result


class RLOO(AdvantageEstimator):
    """``R - mean of the others' R`` within the group: ``G / (G - 1) * (R - mean)``.

    Source: Back to Basics, arXiv 2402.14740, section 4.
    """

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Advantages]]:
        """See `AdvantageEstimator`."""
        result = []
        for group in groups:
            rewards = _rewards(group)
            result.append(_broadcast(group, (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)))
        return result


class ReturnToGo(AdvantageEstimator):
    """Per-turn credit: ``A_t = G_t - baseline_t`` with ``G_t = r_t + discount * G_{t+1}``, scaled over the batch.

    The baseline is a leave-one-out mean of ``G_t``: with ``turn_baseline = "group"`` over the group's other
    trajectories at the same turn, with ``"state"`` over all trajectories of the batch that saw exactly the same tokens
    before turn t (anchor states as in GiGPO, arXiv 2505.10978), and over all at that turn where nobody did. Both depend
    only on what the model had seen, never on its action. Finally ``A / sqrt(mean(A^2))`` over all turns of the batch.

    A trajectory's own ``reward`` is given at its last turn, on top of the turns' rewards.
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"

    @property
    def min_group_size(self) -> int:
        """A state baseline needs no group."""
        return 1 if self.config.turn_baseline == "state" else 2

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Advantages]]:
        """See `AdvantageEstimator`."""
        returns = [[self._returns(trajectory) for trajectory in group.trajectories] for group in groups]
        states: dict[object, list[float]] = defaultdict(list)
        turns: dict[int, list[float]] = defaultdict(list)
        keys: list[list[list[object]]] = []
        for position, group in enumerate(groups):
            keys.append([])
            for index, trajectory in enumerate(group.trajectories):
                keys[-1].append([])
                for turn, step in enumerate(trajectory.steps):
                    by_state = self.config.turn_baseline == "state"
                    key = (turn, step.prompt_ids.tobytes()) if by_state else (turn, position, group.role)
                    value = float(returns[position][index][turn])
                    keys[-1][-1].append(key)
                    states[key].append(value)
                    turns[turn].append(value)
        state_sums = {key: (sum(values), len(values)) for key, values in states.items()}
        turn_sums = {turn: (sum(values), len(values)) for turn, values in turns.items()}
        advantages = []
        for position, group in enumerate(groups):
            advantages.append(
                [
                    np.array(
                        [
                            value - _leave_one_out(value, state_sums[key], turn_sums[turn])
                            for turn, (value, key) in enumerate(
                                zip(returns[position][index].tolist(), keys[position][index], strict=True)
                            )
                        ],
                        np.float64,
                    )
                    for index in range(len(group.trajectories))
                ]
            )
        flat = [value for group in advantages for array in group for value in array]
        scale = float(np.sqrt(np.mean(np.square(flat)))) if flat else 0.0
        return [[array / scale if scale > 1e-8 else np.zeros_like(array) for array in group] for group in advantages]

    def _returns(self, trajectory: Trajectory) -> Advantages:
        rewards = np.array([step.reward or 0.0 for step in trajectory.steps], np.float64)
        if trajectory.reward is not None and len(rewards):
            rewards[-1] += trajectory.reward
        for turn in range(len(rewards) - 2, -1, -1):
            rewards[turn] += self.config.discount * rewards[turn + 1]
        return rewards


def _leave_one_out(value: float, state: tuple[float, int], turn: tuple[float, int]) -> float:
    """The mean of the others with this state, else of the others at this turn, else the value itself."""
    for total, count in (state, turn):
        if count > 1:
            return (total - value) / (count - 1)
    return value

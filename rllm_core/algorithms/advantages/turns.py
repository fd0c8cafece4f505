"""Estimators that credit each turn for what came after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit
from rllm_core.config import Section
from rllm_core.types import Trajectory, TrajectoryGroup


class ReturnToGoOptions(Section):
    """``[algorithm.estimator_options]`` of ``return_to_go``."""

    discount: float = Field(default=1.0, ge=0, le=1, description="Per turn.")
    baseline: Literal["group", "state"] = Field(
        default="group", description="Leave-one-out mean over the group's same turn, or over equal histories."
    )


class ReturnToGo(AdvantageEstimator):
    """Per-turn credit: ``A_t = G_t - baseline_t`` with ``G_t = r_t + discount * G_{t+1}``, scaled over the batch.

    The baseline is a leave-one-out mean of ``G_t``: with ``baseline = "group"`` over the group's other
    trajectories at the same turn, with ``"state"`` over all trajectories of the batch that saw exactly the same tokens
    before turn t (anchor states as in GiGPO, arXiv 2505.10978), and over all at that turn where nobody did. Both depend
    only on what the model had seen, never on its action. Finally ``A / sqrt(mean(A^2))`` over all turns of the batch.

    A trajectory's own ``reward`` is given at its last turn, on top of the turns' rewards.
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"
    options_model = ReturnToGoOptions
    options: ReturnToGoOptions

    @property
    def min_group_size(self) -> int:
        """A state baseline needs no group."""
        return 1 if self.options.baseline == "state" else 2

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
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
                    by_state = self.options.baseline == "state"
                    key = (turn, step.prompt_ids.tobytes()) if by_state else (turn, position, group.role)
                    value = float(returns[position][index][turn])
                    keys[-1][-1].append(key)
                    states[key].append(value)
                    turns[turn].append(value)
        state_sums = {key: (sum(values), len(values)) for key, values in states.items()}
        turn_sums = {turn: (sum(values), len(values)) for turn, values in turns.items()}
        advantages: list[list[Advantages]] = []
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
        rewards += [0.0 if s.token_rewards is None else float(s.token_rewards.sum()) for s in trajectory.steps]
        if trajectory.reward is not None and len(rewards):
            rewards[-1] += trajectory.reward
        for turn in range(len(rewards) - 2, -1, -1):
            rewards[turn] += self.options.discount * rewards[turn + 1]
        return rewards


def _leave_one_out(value: float, state: tuple[float, int], turn: tuple[float, int]) -> float:
    """The mean of the others with this state, else of the others at this turn, else the value itself."""
    for total, count in (state, turn):
        if count > 1:
            return (total - value) / (count - 1)
    return value

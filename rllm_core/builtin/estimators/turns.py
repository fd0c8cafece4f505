"""Estimators that assign each turn its return-to-go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages import AdvantageEstimator, Advantages, Credit
from rllm_core.algorithms.statistics import leave_one_out
from rllm_core.run_file import Section
from rllm_core.types import Step, Trajectory, TrajectoryGroup

MIN_SCALE = 1e-8  # smaller root mean squares are rounding errors


class ReturnToGoOptions(Section):
    """``[algorithm.estimator_options]`` of ``return_to_go``."""

    discount: float = Field(default=1.0, ge=0, le=1, description="Discount factor per turn.")
    baseline: Literal["group", "state"] = Field(
        default="group", description="Leave-one-out mean over the same turn of the group, or over equal histories."
    )


class ReturnToGo(AdvantageEstimator):
    """Per-turn credit: ``A_t = G_t - baseline_t`` with ``G_t = r_t + discount * G_{t+1}``, scaled over the batch.

    The baseline is a leave-one-out mean of ``G_t``. With ``baseline = "group"`` it covers the group's other
    trajectories at the same turn. With ``"state"`` it covers all trajectories of the batch with exactly the same tokens
    before turn t (anchor states as in GiGPO, arXiv 2505.10978). If there are none, it covers the whole batch at that
    turn; a turn that no other trajectory reached gets 0. No baseline depends on the action at turn t. Finally,
    advantages become ``A / sqrt(mean(A^2))`` over all sampled turns of the batch.

    A trajectory's own ``reward`` is added to its last turn, and token rewards to their turn.
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"
    options_model = ReturnToGoOptions
    options: ReturnToGoOptions

    @property
    def min_group_size(self) -> int:
        """1 with a state baseline, which compares trajectories across groups; otherwise 2."""
        return 1 if self.options.baseline == "state" else 2

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        turns = [turn for position, group in enumerate(groups) for turn in self._turns(group, position)]
        of_peers = _less_the_others(turns, lambda turn: turn.peers)
        of_all = _less_the_others(turns, lambda turn: turn.number)
        alone = {peers for peers, count in Counter(turn.peers for turn in turns).items() if count == 1}
        values = np.where([turn.peers in alone for turn in turns], of_all, of_peers)
        scale = float(np.sqrt(np.mean(np.square(values)))) if len(values) else 0.0
        scaled = iter((values / scale if scale > MIN_SCALE else np.zeros_like(values)).tolist())
        return [
            [np.array([next(scaled) if _is_sampled(step) else 0.0 for step in t.steps]) for t in group.trajectories]
            for group in groups
        ]

    def _turns(self, group: TrajectoryGroup, position: int) -> Iterator[_SampledTurn]:
        """Yields the turns of a group that the policy sampled."""
        by_state = self.options.baseline == "state"
        for trajectory in group.trajectories:
            returns = self._returns(trajectory).tolist()
            for number, (step, value) in enumerate(zip(trajectory.steps, returns, strict=True)):
                if _is_sampled(step):
                    seen = step.prompt_ids.tobytes(), tuple(media.sha256 for media in step.prompt_media)
                    yield _SampledTurn(number, (number, seen if by_state else position), value)

    def _returns(self, trajectory: Trajectory) -> Advantages:
        rewards = np.array([step.reward or 0.0 for step in trajectory.steps], np.float64)
        rewards += [0.0 if s.token_rewards is None else float(s.token_rewards.sum()) for s in trajectory.steps]
        if trajectory.reward is not None and len(rewards):
            rewards[-1] += trajectory.reward
        for turn in range(len(rewards) - 2, -1, -1):
            rewards[turn] += self.options.discount * rewards[turn + 1]
        return rewards


class _SampledTurn(NamedTuple):
    """A sampled turn: its number in the trajectory, the key of its comparison group, and its return."""

    number: int
    peers: Hashable
    value: float


def _is_sampled(step: Step) -> bool:
    return step.weight_version is not None


def _less_the_others(turns: Sequence[_SampledTurn], key: Callable[[_SampledTurn], Hashable]) -> Advantages:
    """``(turns,)``: each return minus the mean of the other turns with the same key; 0 if there are none."""
    values = np.array([turn.value for turn in turns])
    positions: dict[Hashable, list[int]] = defaultdict(list)
    for position, turn in enumerate(turns):
        positions[key(turn)].append(position)
    result = np.zeros(len(turns))
    for same in positions.values():
        result[same] = leave_one_out(values[same])
    return result

"""Estimators that compare the trajectories of a whole optimizer step, separately for each role.

They run when the step is consumed, so synchronous and asynchronous training compute the same. Means and variances
exclude tokens that the policy did not sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages import AdvantageEstimator, Credit, sampled_tokens
from rllm_core.algorithms.advantages import rewards as rewards_of
from rllm_core.algorithms.statistics import centred, standardised, whitened
from rllm_core.builtin.estimators.outcome import broadcast
from rllm_core.types import Step, Trajectory, TrajectoryGroup


class ReinforcePlusPlus(AdvantageEstimator):
    """Undiscounted returns-to-go per token, whitened over all sampled tokens of the step.

    A token's return is the sum of the rewards from this token on. Token rewards count at their token; with
    ``[algorithm.kl] place = "reward"`` these are ``-coefficient * KL_t``. A trajectory's reward counts at its last
    token. Without one, each step's reward counts at the step's last token. All of these add up to the total reward.

    Source: REINFORCE++, arXiv 2501.03262. Whitening as in verl (unbiased variance, ``1e-8`` inside the
    root). A group may have one trajectory.
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"
    per_token: ClassVar[bool] = True
    min_group_size = 1  # the baseline covers the whole step

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        returns = [_returns_to_go(trajectory) for trajectory in trajectories]
        tokens = [
            _tokens(step, len(values))
            for trajectory, of_steps in zip(trajectories, returns, strict=True)
            for step, values in zip(trajectory.steps, of_steps, strict=True)
        ]
        flat = [values for of_steps in returns for values in of_steps]
        parts = iter(_split(whitened(_joined(flat), _joined(tokens)), [len(values) for values in flat]))
        return [[_credit(trajectory, parts) for trajectory in group.trajectories] for group in groups]


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """``R - mean`` within the group, whitened over all sampled tokens of the step.

    Whitening also subtracts the mean over tokens. If lengths correlate with rewards, a group of equal rewards therefore
    gets a small common advantage. If all groups of the step are uniform, every advantage is exactly 0.

    Source: REINFORCE++, arXiv 2501.03262, the variant with a group baseline. Whitening as in verl (unbiased variance,
    ``1e-8`` inside the root).
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        deviations = [centred(rewards_of(group)) for group in groups]
        tokens = [sampled_tokens(trajectory) for group in groups for trajectory in group.trajectories]
        return _broadcast(groups, whitened(_joined(deviations), np.array(tokens, np.float64)))


class PRPO(AdvantageEstimator):
    """``(R - mean) / (std + 1e-6)`` over all trajectories of the step, with the population standard deviation.

    Population-relative policy optimization compares tasks with each other, so one rollout per task is enough, for
    example when tasks come from live use. An easy task raises the probability of all of its trajectories.

    Source: rLLM, pull request 669 and its post "continual learning".
    """

    scope: ClassVar[Literal["group", "batch"]] = "batch"
    min_group_size = 1  # trajectories are compared across tasks

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return _broadcast(groups, standardised(_joined([rewards_of(group) for group in groups]), epsilon=1e-6))


def _returns_to_go(trajectory: Trajectory) -> list[npt.NDArray[np.float64]]:
    """Returns per step: ``(completion_tokens,)``, or ``(1,)`` for all tokens if the step has no token rewards."""
    after = 0.0 if trajectory.reward is None else trajectory.reward
    returns = []
    for step in reversed(trajectory.steps):
        if trajectory.reward is None:
            after += step.reward or 0.0
        if step.token_rewards is None:
            returns.append(np.array([after]))
        else:
            to_go = np.cumsum(step.token_rewards[::-1], dtype=np.float64)[::-1]
            returns.append(after + to_go)
            after += float(to_go[0]) if len(to_go) else 0.0
    return returns[::-1]


def _tokens(step: Step, values: int) -> npt.NDArray[np.float64]:
    """``(values,)``: number of sampled tokens that each return of a step represents."""
    if step.weight_version is None:
        return np.zeros(values)
    return np.array([float(len(step.completion_ids))]) if step.token_rewards is None else np.ones(values)


def _credit(trajectory: Trajectory, parts: Iterator[npt.NDArray[np.float64]]) -> Credit:
    """Takes the next part for each step; keeps one number per step if the trajectory has no token rewards."""
    of_steps = [next(parts) for _ in trajectory.steps]
    if all(step.token_rewards is None for step in trajectory.steps):
        return _joined(of_steps)
    return [
        part if step.token_rewards is not None else np.full(len(step.completion_ids), part.item())
        for step, part in zip(trajectory.steps, of_steps, strict=True)
    ]


def _broadcast(groups: Sequence[TrajectoryGroup], values: npt.NDArray[np.float64]) -> list[list[Credit]]:
    """Repeats each trajectory's value for all of its steps; ``values`` has one per trajectory of all groups."""
    of_groups = _split(values, [len(group.trajectories) for group in groups])
    return [broadcast(group, of_group) for group, of_group in zip(groups, of_groups, strict=True)]


def _joined(arrays: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _split(values: npt.NDArray[np.float64], lengths: Sequence[int]) -> list[npt.NDArray[np.float64]]:
    """Splits ``values`` into parts of these lengths."""
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []

"""Groups for estimator tests, and estimator results as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm_core.algorithms.advantages import AdvantageEstimator, Credit
from rllm_core.types import Step, Trajectory, TrajectoryGroup


def turn(
    tokens: int = 1,
    *,
    reward: float | None = None,
    prompt: Sequence[int] = (1,),
    token_rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    sampled: bool = True,
) -> Step:
    return Step(
        prompt_ids=prompt,
        completion_ids=[7] * tokens,
        logprobs=[-1.0] * tokens if sampled else None,
        weight_version=0 if sampled else None,
        reward=reward,
        token_rewards=token_rewards,
        advantages=advantages,
    )


def of(trajectories: Sequence[Trajectory], *, group_id: int = 0, role: str = "agent") -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        task_id=f"task-{group_id}",
        role=role,
        trajectories=list(trajectories),
        rollout_ids=[f"{group_id}-{index}" for index in range(len(trajectories))],
        weight_version=0,
    )


def rewarded(rewards: Sequence[float], lengths: Sequence[int] | None = None, **place: Any) -> TrajectoryGroup:
    """Makes a group of one-turn trajectories with these rewards, with one token each by default."""
    tokens = lengths or [1] * len(rewards)
    return of([Trajectory(steps=[turn(n)], reward=r) for r, n in zip(rewards, tokens, strict=True)], **place)


def numbers(credits: Sequence[Sequence[Credit]]) -> list[list[list[Any]]]:
    """Lists the advantages of steps, or of their tokens, by group and trajectory."""
    return [[[part.tolist() for part in map(np.asarray, credit)] for credit in group] for group in credits]


def advantages(estimator: type[AdvantageEstimator], *groups: TrajectoryGroup, **options: Any) -> list[list[list[Any]]]:
    return numbers(estimator(options)(list(groups)))


def outcomes(estimator: type[AdvantageEstimator], *rewards: Sequence[float], **options: Any) -> list[list[float]]:
    """Returns the advantages of one-turn trajectories with these rewards, one number for each, by group."""
    groups = [rewarded(of_group, group_id=position) for position, of_group in enumerate(rewards)]
    return [[value for [value] in group] for group in advantages(estimator, *groups, **options)]

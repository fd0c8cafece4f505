"""Validation: fixed rollouts of the held-out tasks, measured at one weight version."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllm_core.algorithms.grouping import group_trajectories
from rllm_core.algorithms.samples import training_samples
from rllm_core.training.deadlines import stop
from rllm_core.training.rollouts import Rollout, RolloutKey, RolloutRunner
from rllm_core.training.tasks import spread
from rllm_core.types import Episode, Floats, Task, TrainingSample


@dataclass(frozen=True)
class ValidationResult:
    """One validation.

    Attributes:
        step: Optimizer steps the weights had seen.
        weight_version: Version that was measured.
        rollouts: Rollouts that ended well.
        failed: Rollouts that did not; they count for nothing below.
        reward_mean: Mean total reward, None if nothing ended well or there are no rewards.
        solved: Share with ``is_correct``, None if the workflow has no such notion.
        nll_per_token: Mean negative log-likelihood, in nats, of the tokens that others wrote; None if there are none.
        metrics: Means of the workflow's own, `rllm_core.types.Episode.metrics`, each over the rollouts that have it.
        retries: Failed attempts that were tried again; they count for nothing else.
    """

    step: int
    weight_version: int
    rollouts: int
    failed: int
    reward_mean: float | None
    solved: float | None
    nll_per_token: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    retries: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As it stands in ``summary.json``."""
        return dict(self.__dict__)


async def play_all(runner: RolloutRunner, plan: Sequence[tuple[Task, int]], purpose: str) -> list[Rollout]:
    """Run every rollout of a plan, at most ``max_concurrent_rollouts`` at a time, in the plan's order."""
    tasks = [
        asyncio.create_task(runner.run(task, RolloutKey(purpose, ordinal, index)), name=f"{purpose} rollout {ordinal}")
        for ordinal, (task, index) in enumerate(plan)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await stop(*tasks)  # the others must not run on when one ends them all
        raise


def plan(tasks: Sequence[Task], rollouts: int, *, samples: bool) -> list[tuple[Task, int]]:
    """The tasks of a validation, each with the index of the rollout on it; once each where nothing is sampled."""
    return spread(tasks, rollouts if samples else min(rollouts, len(tasks)))


def rewards_of(episodes: Sequence[Episode]) -> list[float]:
    """The total rewards of those that have any."""
    rewarded = [[t.total_reward for t in e.trajectories if t.trainable and t.has_reward] for e in episodes]
    return [sum(rewards) for rewards in rewarded if rewards]


def written_samples(episodes: Sequence[Episode]) -> list[TrainingSample]:
    """What others wrote in these episodes; advantages are zero."""
    samples = []
    for episode in episodes:
        for group in group_trajectories(0, episode.task_id, [episode]):
            trajectories = [t for t in group.trajectories if all(step.weight_version is None for step in t.steps)]
            written = group.model_copy(
                update={"trajectories": trajectories, "rollout_ids": [episode.rollout_id] * len(trajectories)}
            )
            samples += training_samples(written, [np.zeros(len(t.steps)) for t in trajectories], learns_written=True)
    return samples


def nll_per_token(logprobs: Sequence[Floats]) -> float | None:
    """The mean over all tokens, in nats; None without tokens."""
    tokens = sum(len(array) for array in logprobs)
    return -math.fsum(float(array.sum(dtype=np.float64)) for array in logprobs) / tokens if tokens else None


def metric_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """The workflow's own metrics, sorted by name, each averaged over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def summarise(
    episodes: Sequence[Episode], *, step: int, weight_version: int, nll: float | None = None, retries: int = 0
) -> ValidationResult:
    """Averages over the rollouts that ended well."""
    finished = [episode for episode in episodes if episode.trajectories]
    rewards = rewards_of(finished)
    judged = [episode.is_correct for episode in finished if episode.is_correct is not None]
    return ValidationResult(
        step=step,
        weight_version=weight_version,
        rollouts=len(finished),
        failed=len(episodes) - len(finished),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        solved=sum(judged) / len(judged) if judged else None,
        nll_per_token=nll,
        metrics=metric_means(finished),
        retries=retries,
    )

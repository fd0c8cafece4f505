"""Validation: fixed rollouts of held-out tasks at one weight version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from rllm_core.algorithms.grouping import group_trajectories
from rllm_core.algorithms.samples import training_samples
from rllm_core.assembly.tasks import spread
from rllm_core.costs import Tally, collecting, current
from rllm_core.limits.timeouts import stop
from rllm_core.run_folder.results import ValidationResult, metric_means
from rllm_core.training.costs import Budget
from rllm_core.training.rollouts import Rollout, RolloutKey, RolloutRunner
from rllm_core.training.stopping import BudgetSpent
from rllm_core.types import Episode, Floats, Task, TrainingSample


async def play_all(
    runner: RolloutRunner, plan: Sequence[tuple[Task, int]], purpose: str, step: int = 0, budget: Budget | None = None
) -> list[Rollout]:
    """Runs every rollout of a plan, at most ``max_concurrent_rollouts`` at a time; results are in the plan's order.

    Raises:
        BudgetSpent: If the budget does not cover the rollouts.
    """

    async def play(task: Task, key: RolloutKey) -> Rollout:
        if budget is None:
            return await runner.run(task, key)
        while not budget.fits(1):
            if not await budget.waited():
                raise BudgetSpent(budget.problem())
        budget.start(1)
        with collecting(Tally(current())) as tally:
            try:
                return await runner.run(task, key)
            finally:
                budget.end(1, tally)

    tasks = [
        asyncio.create_task(
            play(task, RolloutKey(purpose, ordinal, index, 0, step)), name=f"{purpose} rollout {ordinal}"
        )
        for ordinal, (task, index) in enumerate(plan)
    ]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await stop(*tasks)  # if one raises, the others must stop
        raise


def plan(tasks: Sequence[Task], rollouts: int, *, samples: bool) -> list[tuple[Task, int]]:
    """Plans a validation as pairs of task and rollout index; one rollout per task if nothing is sampled."""
    return spread(tasks, rollouts if samples else min(rollouts, len(tasks)))


def written_samples(episodes: Sequence[Episode]) -> list[TrainingSample]:
    """Builds samples of the target tokens in these episodes, with zero advantages."""
    samples = []
    for episode in episodes:
        for group in group_trajectories(0, episode.task_id, [episode]):
            trajectories = [t for t in group.trajectories if all(step.weight_version is None for step in t.steps)]
            written = group.model_copy(
                update={"trajectories": trajectories, "rollout_ids": [episode.rollout_id] * len(trajectories)}
            )
            samples += training_samples(written, learns_written=True)
    return samples


def nll_per_token(logprobs: Sequence[Floats]) -> float | None:
    """Computes the mean over all tokens, in nats; None without tokens."""
    tokens = sum(len(array) for array in logprobs)
    return -math.fsum(float(array.sum(dtype=np.float64)) for array in logprobs) / tokens if tokens else None


def summarize(
    episodes: Sequence[Episode], *, step: int, weight_version: int, nll: float | None = None, retries: int = 0
) -> ValidationResult:
    """Summarizes a validation over its successful rollouts."""
    finished = [episode for episode in episodes if episode.trajectories]
    rewards = [reward for episode in finished if (reward := episode.reward) is not None]
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

"""Validation: fixed rollouts of the held-out tasks, measured at one weight version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Task


@dataclass(frozen=True)
class ValidationResult:
    """One validation.

    Attributes:
        step: Optimizer steps the weights had seen.
        weight_version: Version that was measured.
        rollouts: Rollouts that ended well.
        failed: Rollouts that did not; they count for nothing below.
        reward_mean: Mean total reward, None if nothing ended well.
        solved: Share with ``is_correct``, None if the workflow has no such notion.
    """

    step: int
    weight_version: int
    rollouts: int
    failed: int
    reward_mean: float | None
    solved: float | None

    def to_dict(self) -> dict[str, float | int | None]:
        """As it stands in ``summary.json``."""
        return dict(self.__dict__)


async def play_all(runner: RolloutRunner, plan: Sequence[tuple[Task, int]], purpose: str) -> list[Episode]:
    """Play every rollout of a plan, at most ``max_concurrent_rollouts`` at a time, in the plan's order."""
    return list(
        await asyncio.gather(
            *(runner.run(task, RolloutKey(purpose, ordinal, index)) for ordinal, (task, index) in enumerate(plan))
        )
    )


def summarise(episodes: Sequence[Episode], *, step: int, weight_version: int) -> ValidationResult:
    """Averages over the rollouts that ended well."""
    finished = [episode for episode in episodes if episode.trajectories]
    rewards = [sum(t.total_reward for t in e.trajectories if t.trainable) for e in finished]
    judged = [episode.is_correct for episode in finished if episode.is_correct is not None]
    return ValidationResult(
        step=step,
        weight_version=weight_version,
        rollouts=len(finished),
        failed=len(episodes) - len(finished),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        solved=sum(judged) / len(judged) if judged else None,
    )

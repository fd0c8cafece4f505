"""Estimators that need no rewards: a written token is worth its weight, a sampled one what a teacher thinks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit
from rllm_core.config import Section
from rllm_core.errors import RunError
from rllm_core.types import Step, Trajectory, TrajectoryGroup


class SFT(AdvantageEstimator):
    """1 for every written token, or the weight of its step where that has one (`rllm_core.types.Step.advantages`).

    With the loss ``cross_entropy``, this is the maximum likelihood of supervised training.
    """

    learns_written: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False

    @property
    def min_group_size(self) -> int:
        """Nothing is compared."""
        return 1

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`."""
        return [[_weights(group, trajectory) for trajectory in group.trajectories] for group in groups]


def _weights(group: TrajectoryGroup, trajectory: Trajectory) -> Credit:
    return np.array([_weight(group, step) for step in trajectory.steps], np.float64)


def _weight(group: TrajectoryGroup, step: Step) -> float:
    if step.advantages is None or not len(step.advantages):
        return 1.0
    if np.ptp(step.advantages):
        raise RunError(f"task {group.task_id!r}: algorithm.name = 'sft' weighs steps, and not the tokens within one")
    return float(step.advantages[0])


class DistillOptions(Section):
    """``[algorithm.estimator_options]`` of ``distill``."""

    scale: float = Field(default=1.0, gt=0, description="Advantages are multiplied by it, after clipping.")
    clip: float | None = Field(
        default=None, gt=0, description="No token's log ratio counts for more, in either direction; unset is no bound."
    )


class Distill(AdvantageEstimator):
    """``scale * clip(log p_teacher - log p_student)`` per sampled token: the policy gradient of the reverse KL.

    The student samples, and the teacher scores what it sampled. In expectation over the student's tokens, the sum of
    these advantages is the negative divergence ``KL(student || teacher)`` of what follows a prompt, and each token is
    credited with its own term, as in generalised knowledge distillation on policy (arXiv 2306.13649, with the reverse
    divergence of MiniLLM, arXiv 2306.08543). Tokens without a teacher's log-probability get 0.
    """

    needs_rewards: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    options_model = DistillOptions
    options: DistillOptions

    @property
    def min_group_size(self) -> int:
        """Nothing is compared."""
        return 1

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`."""
        return [[[self._credit(group, step) for step in t.steps] for t in group.trajectories] for group in groups]

    def _credit(self, group: TrajectoryGroup, step: Step) -> Advantages:
        if step.weight_version is None or not len(step.completion_ids):
            return np.zeros(len(step.completion_ids))
        if step.advantages is None:
            raise RunError(f"task {group.task_id!r}: step {step.step_id} was sampled, and no teacher has scored it")
        ratios = step.advantages.astype(np.float64)
        if self.options.clip is not None:
            ratios = ratios.clip(-self.options.clip, self.options.clip)
        return self.options.scale * ratios

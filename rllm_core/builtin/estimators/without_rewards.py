"""Estimators that use no rewards: supervised training, distillation, and advantages from the workflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages import AdvantageEstimator, Advantages, Credit
from rllm_core.errors import RunError
from rllm_core.run_file import Section
from rllm_core.types import Step, TrajectoryGroup


class SFT(AdvantageEstimator):
    """1 for every target token, or the weight of the token's step if set (`rllm_core.types.Step.advantages`).

    With the loss ``cross_entropy``, this is supervised maximum-likelihood training.
    """

    learns_written: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False
    min_group_size = 1  # trajectories are not compared

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[np.array([_weight(group, step) for step in t.steps]) for t in group.trajectories] for group in groups]


def _weight(group: TrajectoryGroup, step: Step) -> float:
    if step.advantages is None or not len(step.advantages):
        return 1.0
    if np.ptp(step.advantages):
        raise RunError(f"task {group.task_id!r}: algorithm.name = 'sft' needs one weight per step, not per token")
    return float(step.advantages[0])


class DistillOptions(Section):
    """``[algorithm.estimator_options]`` of ``distill``."""

    scale: float = Field(default=1.0, gt=0, description="Factor applied to advantages, after clipping.")
    clip: float | None = Field(
        default=None, gt=0, description="Limit of a token's absolute log ratio. Defaults to no limit."
    )


class Distill(AdvantageEstimator):
    """``scale * clip(log p_teacher - log p_student)`` per sampled token: the policy gradient of the reverse KL.

    The student samples, and the teacher scores the sampled tokens. In expectation over these tokens, the advantages sum
    to ``-KL(student || teacher)`` of completions given the prompt. Each token gets its own term, as in on-policy
    generalized knowledge distillation (arXiv 2306.13649), with the reverse divergence of MiniLLM (arXiv 2306.08543).
    Tokens without a teacher log-probability get 0.
    """

    needs_rewards: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    options_model = DistillOptions
    options: DistillOptions
    min_group_size = 1  # trajectories are not compared

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[[self._credit(group, step) for step in t.steps] for t in group.trajectories] for group in groups]

    def _credit(self, group: TrajectoryGroup, step: Step) -> Advantages:
        if step.weight_version is None or not len(step.completion_ids):
            return np.zeros(len(step.completion_ids))
        if step.advantages is None:
            raise RunError(f"task {group.task_id!r}: sampled step {step.step_id} has no teacher log-probabilities")
        ratios = step.advantages.astype(np.float64)
        if self.options.clip is not None:
            ratios = ratios.clip(-self.options.clip, self.options.clip)
        return self.options.scale * ratios


class Precomputed(AdvantageEstimator):
    """``Step.advantages`` unchanged, one per token. Rewards are optional; they are recorded but not used.

    A sampled step without advantages is an error that names the task, because a missing advantage is not one of 0.
    """

    needs_rewards: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    min_group_size = 1  # the group is not compared

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        return [[[_given(group, s) for s in t.steps] for t in group.trajectories] for group in groups]


def _given(group: TrajectoryGroup, step: Step) -> Advantages:
    if step.advantages is not None:
        return step.advantages.astype(np.float64)
    if step.weight_version is None or not len(step.completion_ids):
        return np.zeros(len(step.completion_ids))
    raise RunError(
        f"task {group.task_id!r}: algorithm.name = 'precomputed' takes advantages from the workflow, but step "
        f"{step.step_id} of role {group.role!r} has none; set Step.advantages, one number per sampled token"
    )

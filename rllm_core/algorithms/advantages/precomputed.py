"""Advantages that the workflow or its own judge has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit
from rllm_core.errors import RunError
from rllm_core.types import Step, TrajectoryGroup


class Precomputed(AdvantageEstimator):
    """``Step.advantages`` unchanged, one per token. Rewards are optional; they are recorded but not used.

    A sampled step without advantages is an error, because a missing advantage is not an advantage of 0.
    """

    needs_rewards: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    @property
    def min_group_size(self) -> int:
        """1: the group is not compared."""
        return 1

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`.

        Raises:
            RunError: If a sampled step has no advantages. The message names the task.
        """
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

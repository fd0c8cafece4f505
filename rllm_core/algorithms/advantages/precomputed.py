"""Advantages that were computed elsewhere: by a workflow, or a judge of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit
from rllm_core.errors import RunError
from rllm_core.types import Step, TrajectoryGroup


class Precomputed(AdvantageEstimator):
    """``Step.advantages`` as they are, token by token; rewards are optional, recorded, and not used.

    A step that the policy sampled and that has none is an error: no advantage is not an advantage of 0.
    """

    needs_rewards: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    @property
    def min_group_size(self) -> int:
        """Whatever they were compared with, it was not the group."""
        return 1

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """See `AdvantageEstimator`.

        Raises:
            RunError: If a sampled step has no advantages; names the task.
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

"""The contract of an advantage estimator, and the assignment of estimators to roles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.options import Configured
from rllm_core.errors import RunError
from rllm_core.types import Trajectory, TrajectoryGroup

__all__ = ["AdvantageEstimator", "Advantages", "Credit", "RoleEstimators"]

__path__: list[str] = []  # lets submodules that moved be imported by their old names

Advantages = npt.NDArray[np.float64]
Credit = Advantages | list[Advantages]
"""Advantages of a trajectory: ``(steps,)``, or a list with ``(completion_tokens,)`` for each step."""


class AdvantageEstimator(Configured, ABC):
    """Computes advantages for the groups of an optimizer step; selected by ``algorithm.name``.

    Attributes:
        scope: ``group`` if groups are independent of each other, ``batch`` if a group's advantages depend on the
            other groups of the optimizer step. ``batch`` estimators run once the whole step is available.
        learns_written: Whether it assigns advantages to tokens that the policy did not sample, as supervised training
            does.
        needs_rewards: Whether a trajectory without a reward is an error.
        needs_teacher: Whether a teacher (``[teacher]``) scores sampled tokens first. Steps then contain the teacher's
            log-probabilities minus the policy's, in `rllm_core.types.Step.advantages`.
        per_token: Whether advantages may differ within a turn. Not every backend supports this.
    """

    scope: ClassVar[Literal["group", "batch"]] = "group"
    learns_written: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = False
    per_token: ClassVar[bool] = False

    @property
    def min_group_size(self) -> int:
        """Minimum group size. Smaller groups are filtered; a configuration with fewer rollouts is rejected."""
        return 2

    @abstractmethod
    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Computes advantages per group and trajectory.

        Args:
            groups: One group if the scope is ``group``, all groups of an optimizer step if it is ``batch``. Rewards
                may include token rewards (`rllm_core.types.Step.token_rewards`).
        """


class RoleEstimators:
    """The estimators of a run: a default, and exceptions for some roles.

    Args:
        default: Estimator of roles without an entry in ``by_role``.
        by_role: Estimators by group name, which is the role unless the workflow overrides ``group_of``.
        shaped: Function that transforms the rewards before an estimator receives them.
        weights: Factors applied to advantages, by group name as in ``by_role``; 1 for other groups.
    """

    def __init__(
        self,
        default: AdvantageEstimator,
        by_role: Mapping[str, AdvantageEstimator] | None = None,
        shaped: Callable[[TrajectoryGroup], TrajectoryGroup] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.default = default
        self.by_role = dict(by_role or {})
        self._shaped = shaped
        self._weights = {role: weight for role, weight in (weights or {}).items() if weight != 1}

    def of(self, role: str) -> AdvantageEstimator:
        """Returns the estimator for trajectories of ``role``."""
        return self.by_role.get(role, self.default)

    @property
    def all(self) -> list[AdvantageEstimator]:
        """Every estimator in use."""
        return [self.default, *self.by_role.values()]

    @property
    def scope(self) -> Literal["group", "batch"]:
        """``batch`` if any estimator needs the whole step."""
        return "batch" if any(estimator.scope == "batch" for estimator in self.all) else "group"

    @property
    def learns_written(self) -> bool:
        """Whether any estimator assigns advantages to tokens that the policy did not sample."""
        return any(estimator.learns_written for estimator in self.all)

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Computes advantages per group and trajectory, separately for each role.

        Raises:
            RunError: If an estimator fails, or does not return advantages for every group and trajectory.
        """
        positions: dict[str, list[int]] = {}
        for position, group in enumerate(groups):
            positions.setdefault(group.role, []).append(position)
        result: list[list[Credit]] = [[] for _ in groups]
        for role, of_role in positions.items():
            credits = self._credits(self.of(role), [groups[position] for position in of_role])
            weight = self._weights.get(role)
            for position, credit in zip(of_role, credits, strict=True):
                result[position] = credit if weight is None else [weighted(single, weight) for single in credit]
        return result

    def _credits(self, estimator: AdvantageEstimator, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Calls an estimator and checks that it returns advantages for every trajectory."""
        shaped = groups
        if self._shaped is not None and estimator.needs_rewards:
            shaped = [self._shaped(group) for group in groups]
        counted = estimator.attempt(lambda: [(credit, len(credit)) for credit in estimator(shaped)])
        returned = f"{estimator.label} returned advantages for"
        if len(counted) != len(groups):
            raise RunError(f"{returned} {len(counted)} of {len(groups)} groups")
        for group, (credit, count) in zip(groups, counted, strict=True):
            if count != len(group.trajectories):
                raise RunError(
                    f"{returned} {count} of {len(group.trajectories)} trajectories of task {group.task_id!r}"
                )
            if not estimator.per_token and any(isinstance(single, list) for single in credit):
                raise RunError(f"{estimator.label} returns advantages per token; declare this with per_token = True")
        return [credit for credit, _ in counted]


def rewards(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
    """``(trajectories,)``: total rewards of a group."""
    return np.array([trajectory.total_reward for trajectory in group.trajectories], np.float64)


def sampled_tokens(trajectory: Trajectory) -> int:
    """Number of tokens of a trajectory that the policy sampled."""
    return sum(step.completion_tokens for step in trajectory.steps if step.weight_version is not None)


def weighted(credit: Credit, weight: float) -> Credit:
    """Multiplies a trajectory's advantages by ``weight``."""
    return [np.multiply(turn, weight) for turn in credit] if isinstance(credit, list) else np.multiply(credit, weight)

"""What an advantage estimator is, and which one credits which role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.options import Configured
from rllm_core.blame import blamed
from rllm_core.errors import RunError, UserError
from rllm_core.types import Trajectory, TrajectoryGroup

Advantages = npt.NDArray[np.float64]
Credit = Advantages | list[Advantages]
"""What a trajectory is credited with: one number per step, ``(steps,)``, or per step ``(completion_tokens,)``."""


class AdvantageEstimator(Configured, ABC):
    """Computes advantages for groups of one step; selected by ``algorithm.name``.

    Attributes:
        scope: ``group`` if groups are independent of each other, ``batch`` if a group's advantages depend on the
            other groups of the optimizer step; the latter is computed when the whole step is at hand.
        learns_written: Whether it credits tokens that nobody sampled, as supervised training does.
        needs_rewards: Whether trajectories without a reward are errors.
        needs_teacher: Whether a teacher (``[teacher]``) scores sampled tokens before they are credited; steps then
            carry its log-probabilities less those of the policy as `rllm_core.types.Step.advantages`.
        per_token: Whether advantages may differ within a turn, which not every backend can train.
    """

    scope: ClassVar[Literal["group", "batch"]] = "group"
    learns_written: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = False
    per_token: ClassVar[bool] = False

    @property
    def min_group_size(self) -> int:
        """Groups with fewer trajectories are filtered, and a run configured for fewer is refused."""
        return 2

    @abstractmethod
    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Advantages per group and trajectory.

        Args:
            groups: One group if the scope is ``group``, those of a whole optimizer step if it is ``batch``. Rewards
                may include rewards of single tokens (`rllm_core.types.Step.token_rewards`).
        """


class RoleEstimators:
    """The estimators of a run: one for most roles, others for some.

    Args:
        default: For every role that is not named.
        by_role: For the others, by the names of their groups: roles, unless a workflow's ``group_of`` says otherwise.
        shaped: What rewards become before an estimator sees them.
        weights: Factors applied to the advantages of single roles, by the same names as ``by_role``; 1 for the others.
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
        """Who credits trajectories of ``role``."""
        return self.by_role.get(role, self.default)

    @property
    def all(self) -> list[AdvantageEstimator]:
        """Every estimator in use."""
        return [self.default, *self.by_role.values()]

    @property
    def scope(self) -> Literal["group", "batch"]:
        """``batch`` if any of them needs the whole step."""
        return "batch" if any(estimator.scope == "batch" for estimator in self.all) else "group"

    @property
    def learns_written(self) -> bool:
        """Whether any of them credits tokens that nobody sampled."""
        return any(estimator.learns_written for estimator in self.all)

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Advantages per group and trajectory; roles are computed apart from each other.

        Raises:
            RunError: If an estimator fails, or does not answer for every group and trajectory.
        """
        places: dict[str, list[int]] = {}
        for position, group in enumerate(groups):
            places.setdefault(group.role, []).append(position)
        result: list[list[Credit]] = [[] for _ in groups]
        for role, positions in places.items():
            estimator = self.of(role)
            compared = [groups[position] for position in positions]
            if self._shaped is not None and estimator.needs_rewards:
                compared = [self._shaped(group) for group in compared]
            try:
                credits = estimator(compared)
                counts = [len(credit) for credit in credits]
            except UserError:
                raise
            except Exception as error:  # it may be anybody's
                raise RunError(f"{estimator.label} failed: {blamed(error)}") from error
            if len(counts) != len(positions):
                raise RunError(f"{estimator.label} credited {len(counts)} of {len(positions)} groups")
            for position, credit, count in zip(positions, credits, counts, strict=True):
                if count != len(groups[position].trajectories):
                    raise RunError(
                        f"{estimator.label} credited {count} of {len(groups[position].trajectories)} "
                        f"trajectories of task {groups[position].task_id!r}"
                    )
                if not estimator.per_token and any(isinstance(single, list) for single in credit):
                    raise RunError(
                        f"{estimator.label} credits single tokens, and does not declare it: per_token = True"
                    )
                weight = self._weights.get(role)
                result[position] = credit if weight is None else [weighted(single, weight) for single in credit]
        return result


def rewards(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
    """``(trajectories,)`` total rewards of a group."""
    return np.array([trajectory.total_reward for trajectory in group.trajectories], np.float64)


def sampled_tokens(trajectory: Trajectory) -> int:
    """How many tokens of it the policy sampled."""
    return sum(len(step.completion_ids) for step in trajectory.steps if step.weight_version is not None)


def weighted(credit: Credit, weight: float) -> Credit:
    """A trajectory's advantages, each multiplied by ``weight``."""
    return [np.multiply(turn, weight) for turn in credit] if isinstance(credit, list) else np.multiply(credit, weight)


def per_step(trajectory: Trajectory, value: float) -> Advantages:
    """``(steps,)`` the same for every step."""
    return np.full(len(trajectory.steps), value, np.float64)

"""Tests which estimator credits which role, and what happens to invalid results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from groups import numbers, of, rewarded, turn

from rllm_core.algorithms.advantages import AdvantageEstimator, Credit, RoleEstimators
from rllm_core.algorithms.samples import training_samples
from rllm_core.builtin.estimators.batch import PRPO, ReinforcePlusPlus
from rllm_core.builtin.estimators.outcome import GRPO, DrGRPO, Reinforce
from rllm_core.errors import RunError
from rllm_core.plugins.blame import blamed
from rllm_core.types import Trajectory, TrajectoryGroup


def test_each_role_has_its_estimator_and_its_own_batch() -> None:
    solvers = [rewarded([1.0, 0.0], role="solver"), rewarded([1.0, 1.0], role="solver", group_id=1)]
    judges = [rewarded([5.0, 3.0], role="judge"), rewarded([1.0], role="judge", group_id=1)]
    estimators = RoleEstimators(DrGRPO(), {"judge": PRPO()})
    mixed = estimators([solvers[0], judges[0], judges[1], solvers[1]])
    assert numbers(mixed) == numbers([*DrGRPO()(solvers[:1]), *PRPO()(judges), *DrGRPO()(solvers[1:])])
    assert estimators.scope == "batch"
    assert [estimators.of(role).min_group_size for role in ("solver", "judge")] == [2, 1]


def test_default_estimators_compute_roles_apart_too() -> None:
    estimator = ReinforcePlusPlus()
    pair = [rewarded([1.0, 0.0], role="a"), rewarded([50.0, 0.0], role="b")]
    assert numbers(RoleEstimators(estimator)(pair)) == numbers([estimator([group])[0] for group in pair])
    assert numbers(RoleEstimators(estimator)(pair)) != numbers(estimator(pair))


class Answers(AdvantageEstimator):
    """Third-party estimator that returns a given answer."""

    per_token = True

    def __init__(self, answer: Callable[[Sequence[TrajectoryGroup]], Any]) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        answer: list[list[Credit]] = self.answer(groups)
        return answer


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda groups: [], "returned advantages for 0 of 1 groups"),
        (lambda groups: [[]], "returned advantages for 0 of 2 trajectories of task 'task-3'"),
        (lambda groups: [None], "Answers failed: TypeError"),
        (lambda groups: groups[7], r"Answers failed: \S*tests/algorithms/test_role_estimators\.py:\d+: IndexError"),
    ],
)
def test_an_estimator_that_does_not_answer_for_everybody(answer: Callable[..., Any], complaint: str) -> None:
    estimator = Answers(answer)
    estimator.describe = blamed  # as if a run had selected it
    with pytest.raises(RunError, match=complaint):
        RoleEstimators(estimator)([rewarded([1.0, 0.0], group_id=3)])


@pytest.mark.parametrize(
    "credit",
    [
        np.array([float("nan"), 0.0]),
        np.array([0.0, float("-inf")]),
        np.array([1e39, 0.0]),
        np.array([None, 0.0]),
        np.array(["0.5", "1.0"]),
        np.array([True, False]),
        np.array([1j, 0.0]),
        np.array([1.0]),
        np.array([[1.0, 2.0]]),
        None,
        "12",
        [np.array([0.0]), np.array([float("nan")])],
        [np.array([0.0]), np.array(["1"])],
        [np.array([0.0]), None],
        [np.array([0.0]), np.array([0.0, 1.0])],
    ],
)
def test_advantages_that_are_no_numbers_never_become_samples(credit: Any) -> None:
    group = of([Trajectory(steps=[turn(1), turn(1)], reward=1.0)], group_id=5)
    with pytest.raises(ValueError, match="task 'task-5': the estimator returned advantages"):
        training_samples(group, RoleEstimators(Answers(lambda groups: [[credit]]))([group])[0])


def test_what_needs_no_whole_step_is_of_group_scope() -> None:
    assert RoleEstimators(GRPO(), {"judge": Reinforce()}).scope == "group"

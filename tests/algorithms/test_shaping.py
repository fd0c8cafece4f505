"""Tests the soft overlong penalty: its size, and who sees it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from groups import of, rewarded, turn
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.grouping import FilterReason, filter_reason
from rllm_core.algorithms.shaping import OverlongPenalty
from rllm_core.assembly.components import overlong_penalty
from rllm_core.builtin.estimators.batch import ReinforcePlusPlus
from rllm_core.builtin.estimators.outcome import DrGRPO, Reinforce
from rllm_core.builtin.estimators.turns import ReturnToGo
from rllm_core.builtin.estimators.without_rewards import Precomputed
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.types import Trajectory

DAPO = OverlongPenalty(max_tokens=20480, penalty_tokens=4096, penalty=1.0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)],
)
def test_the_numbers_of_the_paper(tokens: int, expected: float) -> None:
    assert DAPO.of_length(tokens) == expected


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 120), st.sampled_from([0.5, 1.0, 3.0]))
def test_three_pieces(penalty_tokens: int, more: int, tokens: int, penalty: float) -> None:
    limit = penalty_tokens + more
    if tokens <= limit - penalty_tokens:
        expected = Fraction(0)
    elif tokens <= limit:
        expected = Fraction(limit - penalty_tokens - tokens, penalty_tokens)
    else:
        expected = Fraction(-1)
    found = OverlongPenalty(limit, penalty_tokens, penalty).of_length(tokens)
    assert found == pytest.approx(float(expected) * penalty, abs=1e-12)


SMALL = OverlongPenalty(max_tokens=4, penalty_tokens=2, penalty=1.0)


def test_estimators_see_the_punished_reward_and_the_group_keeps_what_was_given() -> None:
    group = rewarded([1.0, 1.0, 0.0], [2, 3, 5])
    [credits] = RoleEstimators(Reinforce(), shaped=SMALL)([group])
    assert [credit.tolist() for credit in map(np.asarray, credits)] == [[1.0], [0.5], [-1.0]]
    assert [t.total_reward for t in group.trajectories] == [1.0, 1.0, 0.0]


def test_the_length_is_what_the_policy_sampled_over_all_turns() -> None:
    two_turns = Trajectory(steps=[turn(2), turn(10, sampled=False), turn(1)], reward=1.0)
    [[credit]] = RoleEstimators(Reinforce(), shaped=SMALL)([of([two_turns])])
    assert np.asarray(credit).tolist() == [0.5] * 3


def test_rewards_per_step_are_punished_at_the_end() -> None:
    steps = [turn(2, reward=1.0), turn(2)]
    as_given = [[1.0, 0.0], [1.0]]
    group = of([Trajectory(steps=steps), Trajectory(steps=[turn(1, reward=1.0)])])
    for estimator in (ReinforcePlusPlus, ReturnToGo, DrGRPO):
        spelled = of([Trajectory(steps=[steps[0], turn(2, reward=-1.0)]), group.trajectories[1]])
        [punished], [expected] = RoleEstimators(estimator(), shaped=SMALL)([group]), estimator()([spelled])
        assert [np.asarray(c).tolist() for c in punished] == [np.asarray(c).tolist() for c in expected]
    rewards = [[step.reward or 0.0 for step in trajectory.steps] for trajectory in group.trajectories]
    assert rewards == as_given


def test_uniform_is_what_the_rewards_were_before() -> None:
    """As in DAPO, answers that are all wrong are uniform even if their lengths differ."""
    wrong = rewarded([0.0, 0.0], [1, 9])
    assert filter_reason(wrong, min_group_size=2, drop_uniform=True) is FilterReason.UNIFORM_REWARD
    [credits] = RoleEstimators(DrGRPO(), shaped=SMALL)([wrong])
    assert [np.asarray(credit).tolist() for credit in credits] == [[0.5], [-0.5]], (
        "trained, where they are not filtered"
    )


def test_precomputed_advantages_stay_as_they_are() -> None:
    group = of([Trajectory(steps=[turn(9, advantages=[2.0] * 9)], reward=0.0)])
    [[credit]] = RoleEstimators(Precomputed(), shaped=SMALL)([group])
    assert np.asarray(credit).tolist() == [[2.0] * 9]


def overlong(**keys: float | None) -> OverlongPenalty | None:
    return overlong_penalty(
        RunConfig.model_validate(
            {"workflow": "w", "rollout": {"max_response_tokens": 100}, "algorithm": {"overlong": keys}}
        )
    )


def test_as_the_run_file_says() -> None:
    assert overlong() is None
    assert overlong(penalty_tokens=10) == OverlongPenalty(100, 10, 1.0)
    assert overlong(penalty_tokens=10, max_tokens=50, penalty=0.5) == OverlongPenalty(50, 10, 0.5)
    with pytest.raises(ConfigError, match=r"penalty_tokens = 101 must not exceed rollout\.max_response_tokens = 100"):
        overlong(penalty_tokens=101)
    with pytest.raises(ConfigError, match=r"must not exceed algorithm\.overlong\.max_tokens = 50"):
        overlong(penalty_tokens=51, max_tokens=50)

"""Advantages against numbers computed by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.advantages.outcome import GRPO, RLOO
from rllm_core.algorithms.advantages.turns import ReturnToGo
from rllm_core.types import Step, Trajectory, TrajectoryGroup


def group(rewards: list[float], *, group_id: int = 0) -> TrajectoryGroup:
    return turns_group([[(None, (1,))] for _ in rewards], rewards, group_id=group_id)


def turns_group(
    turns: list[list[tuple[float | None, tuple[int, ...]]]],
    rewards: list[float | None] | list[float],
    *,
    group_id: int = 0,
) -> TrajectoryGroup:
    """Trajectories from (step reward, prompt) pairs."""
    trajectories = [
        Trajectory(
            steps=[
                Step(prompt_ids=prompt, completion_ids=[7], logprobs=[-1.0], weight_version=0, reward=value)
                for value, prompt in steps
            ],
            reward=reward,
        )
        for steps, reward in zip(turns, rewards, strict=True)
    ]
    return TrajectoryGroup(
        group_id=group_id,
        task_id="t",
        trajectories=trajectories,
        rollout_ids=[str(index) for index in range(len(trajectories))],
        weight_version=0,
    )


def advantages(estimator: type[AdvantageEstimator], *groups: TrajectoryGroup, **config: Any) -> list[list[list[float]]]:
    result = estimator(config)(list(groups))
    return [[array.tolist() for array in group] for group in result]


GOLDEN = [1, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("estimator", "good", "bad"), [(GRPO, 1.73205, -0.57735), (RLOO, 0.85714, -0.28571)])
def test_golden_vectors(estimator: type[AdvantageEstimator], good: float, bad: float) -> None:
    [result] = advantages(estimator, group(GOLDEN))
    for reward, [value] in zip(GOLDEN, result, strict=True):
        assert value == pytest.approx(good if reward else bad, abs=1e-5)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9))
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards: list[int]) -> None:
    [result] = advantages(RLOO, group([float(reward) for reward in rewards]))
    for index, [value] in enumerate(result):
        others = [Fraction(reward) for position, reward in enumerate(rewards) if position != index]
        assert value == pytest.approx(float(Fraction(rewards[index]) - sum(others) / len(others)), abs=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(2, 8))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert advantages(GRPO, group([reward] * size)) == [[[0.0]] * size]


def test_return_to_go_by_hand() -> None:
    # two trajectories of two turns: returns with discount 0.5 are (1 + 0.5 * 2, 2) and (0 + 0.5 * 1, 1)
    pair = turns_group([[(1.0, (1,)), (2.0, (1, 7, 2))], [(0.0, (1,)), (1.0, (1, 7, 3))]], [None, None])
    [result] = advantages(ReturnToGo, pair, discount=0.5)
    raw = np.array([[1.5, 1.0], [-1.5, -1.0]])
    expected = raw / np.sqrt((raw**2).mean())
    assert np.allclose(result, expected)


def test_a_trajectory_reward_comes_at_its_last_turn() -> None:
    with_own = turns_group([[(None, (1,)), (0.5, (2,))], [(None, (1,)), (0.5, (2,))]], [2.0, 1.0])
    spelled = turns_group([[(None, (1,)), (2.5, (2,))], [(None, (1,)), (1.5, (2,))]], [None, None])
    assert advantages(ReturnToGo, with_own) == advantages(ReturnToGo, spelled)


def test_state_baseline_compares_equal_histories_over_all_groups() -> None:
    first = turns_group([[(3.0, (1, 2))], [(0.0, (9, 9))]], [None, None], group_id=0)
    second = turns_group([[(1.0, (1, 2))], [(2.0, (8, 8))]], [None, None], group_id=1)
    result = advantages(ReturnToGo, first, second, baseline="state")
    # (1, 2) was seen twice: 3 - 1 and 1 - 3; (9, 9) and (8, 8) once: minus the mean of all others at that turn
    raw = np.array([3 - 1, 0 - (3 + 1 + 2) / 3, 1 - 3, 2 - (3 + 0 + 1) / 3])
    expected = raw / np.sqrt((raw**2).mean())
    assert np.allclose([result[0][0][0], result[0][1][0], result[1][0][0], result[1][1][0]], expected)


def test_return_to_go_of_equal_returns_is_zero() -> None:
    assert advantages(ReturnToGo, group([1.0, 1.0])) == [[[0.0], [0.0]]]

"""Tests advantages within a group against published numbers, exact fractions and laws of the formulas."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from groups import advantages, of, outcomes, rewarded, turn
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.statistics import is_uniform
from rllm_core.builtin.estimators.batch import PRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rllm_core.builtin.estimators.outcome import GRPO, RLOO, DrGRPO, Reinforce
from rllm_core.builtin.estimators.turns import ReturnToGo
from rllm_core.builtin.estimators.without_rewards import Distill, Precomputed
from rllm_core.errors import ConfigError, RunError
from rllm_core.types import Trajectory

GOLDEN = [1, 0, 0, 1, 0, 0, 0, 0]
WITHIN_A_GROUP = [GRPO, DrGRPO, RLOO]
Estimator = type[AdvantageEstimator]
rewards = st.lists(st.integers(-5, 5), min_size=2, max_size=9)


@pytest.mark.parametrize(
    ("estimator", "options", "good", "bad"),
    [
        (GRPO, {}, 1.73205, -0.57735),
        (GRPO, {"std": "sample"}, 1.62018, -0.54006),
        (DrGRPO, {}, 0.75, -0.25),
        (RLOO, {}, 0.85714, -0.28571),
        (Reinforce, {}, 1.0, 0.0),
    ],
)
def test_golden_vectors(estimator: Estimator, options: dict[str, str], good: float, bad: float) -> None:
    [result] = outcomes(estimator, GOLDEN, **options)
    for reward, value in zip(GOLDEN, result, strict=True):
        assert value == pytest.approx(good if reward else bad, abs=1e-5)  # to the number of published digits


@pytest.mark.parametrize(("std", "good"), [("population", math.sqrt(3)), ("sample", 0.75 / math.sqrt(3 / 14))])
def test_golden_vectors_in_closed_form(std: str, good: float) -> None:
    [result] = outcomes(GRPO, GOLDEN, std=std, epsilon=0.0)
    assert result == pytest.approx([good if reward else -good / 3 for reward in GOLDEN], abs=1e-12)


@pytest.mark.slow
@given(rewards, st.sampled_from(["population", "sample"]))
def test_grpo_squared_is_an_exact_fraction(given_rewards: list[int], std: str) -> None:
    exact = [Fraction(reward) for reward in given_rewards]
    mean = sum(exact) / len(exact)
    variance = sum((r - mean) ** 2 for r in exact) / (len(exact) - (std == "sample"))
    [result] = outcomes(GRPO, given_rewards, std=std, epsilon=0.0)
    for reward, value in zip(exact, result, strict=True):
        expected = (reward - mean) ** 2 / variance if variance else Fraction(0)
        assert value**2 == pytest.approx(float(expected), abs=1e-12)
        assert value * float(reward - mean) >= 0


@given(rewards)
def test_dr_grpo_and_rloo_are_exact_fractions(given_rewards: list[int]) -> None:
    exact = [Fraction(reward) for reward in given_rewards]
    mean = sum(exact) / len(exact)
    [centred], [against_others] = outcomes(DrGRPO, given_rewards), outcomes(RLOO, given_rewards)
    assert centred == pytest.approx([float(reward - mean) for reward in exact], abs=1e-12)
    for index, value in enumerate(against_others):
        others = [reward for position, reward in enumerate(exact) if position != index]
        assert value == pytest.approx(float(exact[index] - sum(others) / len(others)), abs=1e-12)


@given(rewards, st.randoms(use_true_random=False))
@pytest.mark.parametrize(
    ("estimator", "rounding"),
    [
        *((e, 0.0) for e in (*WITHIN_A_GROUP, Reinforce, PRPO)),
        (ReinforcePlusPlusBaseline, 1e-12),
        (ReinforcePlusPlus, 1e-12),
    ],
)
def test_the_order_of_trajectories_does_not_matter(
    estimator: Estimator, rounding: float, given_rewards: list[int], random: np.random.Generator
) -> None:
    order = list(range(len(given_rewards)))
    random.shuffle(order)
    [straight], [shuffled] = outcomes(estimator, given_rewards), outcomes(estimator, [given_rewards[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=0, abs=rounding)


@given(rewards, st.integers(-1000, 1000))
@pytest.mark.parametrize("estimator", [*WITHIN_A_GROUP, PRPO, ReinforcePlusPlusBaseline, ReinforcePlusPlus])
def test_a_constant_added_to_every_reward_changes_nothing(
    estimator: Estimator, given_rewards: list[int], constant: int
) -> None:
    [plain], [shifted] = outcomes(estimator, given_rewards), outcomes(estimator, [r + constant for r in given_rewards])
    assert shifted == plain


@given(rewards, st.integers(-4, 4))
def test_what_is_linear_in_rewards_and_what_does_not_see_their_scale(given_rewards: list[int], power: int) -> None:
    scaled = [math.ldexp(reward, power) for reward in given_rewards]
    for estimator in (DrGRPO, RLOO, Reinforce):
        [plain], [result] = outcomes(estimator, given_rewards), outcomes(estimator, scaled)
        assert result == [math.ldexp(value, power) for value in plain]
    assert outcomes(GRPO, scaled, epsilon=0.0) == outcomes(GRPO, given_rewards, epsilon=0.0)


@given(st.floats(-1e6, 1e6), st.integers(1, 8))
@pytest.mark.parametrize("estimator", [*WITHIN_A_GROUP, PRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReturnToGo])
def test_equal_rewards_give_exactly_zero(estimator: Estimator, reward: float, size: int) -> None:
    assert outcomes(estimator, [reward] * size, [reward] * size) == [[0.0] * size] * 2


@pytest.mark.parametrize("estimator", [*WITHIN_A_GROUP, ReturnToGo])
@pytest.mark.parametrize("uniform", [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [0.7, 0.6 + 0.1, 0.7], [1e-12] * 7])
def test_rewards_that_differ_by_rounding_are_equal(estimator: Estimator, uniform: list[float]) -> None:
    others = [1.0, 0.0, 1.0]
    first, _ = outcomes(estimator, uniform, others)
    assert first == [0.0] * len(uniform)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=9))
@pytest.mark.parametrize("estimator", [*WITHIN_A_GROUP, PRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReturnToGo])
def test_whatever_the_rewards_advantages_are_numbers(estimator: Estimator, given_rewards: list[float]) -> None:
    [result] = outcomes(estimator, given_rewards)
    assert np.isfinite(result).all()


def test_rewards_that_are_meant_to_differ_are_not_uniform() -> None:
    assert not is_uniform(np.array([1e6, 1e6 + 0.1]))
    assert not is_uniform(np.array([0.0, 1e-12]))
    assert is_uniform(np.array([]))


@pytest.mark.parametrize(
    ("estimator", "options", "needs", "alone"),
    [
        (GRPO, {}, 2, 0.0),
        (DrGRPO, {}, 2, 0.0),
        (RLOO, {}, 2, 0.0),
        (ReinforcePlusPlusBaseline, {}, 2, 0.0),
        (ReturnToGo, {}, 2, 0.0),
        (ReturnToGo, {"baseline": "state"}, 1, 0.0),
        (PRPO, {}, 1, 0.0),
        (ReinforcePlusPlus, {}, 1, 0.0),
        (Reinforce, {"baseline": 1.0}, 1, 2.0),
    ],
)
def test_a_lone_trajectory_is_not_pushed_by_its_reward(
    estimator: Estimator, options: dict[str, float], needs: int, alone: float
) -> None:
    assert estimator(options).min_group_size == needs
    assert outcomes(estimator, [3.0], **options) == [[alone]]


@given(rewards, st.floats(-10, 10))
def test_reinforce_is_the_reward_less_a_constant(given_rewards: list[int], baseline: float) -> None:
    assert outcomes(Reinforce, given_rewards, baseline=baseline) == [[reward - baseline for reward in given_rewards]]


def test_every_turn_of_a_trajectory_gets_its_advantage() -> None:
    long = Trajectory(steps=[turn(2), turn(3), turn(1)], reward=1.0)
    short = Trajectory(steps=[turn(1)], reward=0.0)
    assert advantages(DrGRPO, of([long, short])) == [[[0.5] * 3, [-0.5]]]


def test_precomputed_advantages_are_taken_as_they_are() -> None:
    mixed = Trajectory(
        steps=[turn(2, advantages=[0.5, -2.0]), turn(1, sampled=False), turn(1, advantages=[3.0])], reward=9.0
    )
    assert Precomputed().min_group_size == 1
    assert advantages(Precomputed, of([mixed])) == [[[[0.5, -2.0], [0.0], [3.0]]]]


def test_a_sampled_step_without_precomputed_advantages_is_an_error_that_names_the_task() -> None:
    with pytest.raises(RunError, match=r"task 'task-4'.* has none; set Step.advantages"):
        advantages(Precomputed, rewarded([1.0], group_id=4))


def test_distillation_clips_what_the_teacher_says_and_then_scales_it() -> None:
    group = of([Trajectory(steps=[turn(3, advantages=[-9.0, 0.5, 9.0]), turn(1, sampled=False)])])
    assert advantages(Distill, group, clip=2.0, scale=0.5) == [[[[-1.0, 0.25, 1.0], [0.0]]]]
    assert advantages(Distill, group) == [[[[-9.0, 0.5, 9.0], [0.0]]]]


@pytest.mark.parametrize(
    ("estimator", "options", "key"),
    [(GRPO, {"std": "biased"}, "std"), (GRPO, {"epsilon": -1.0}, "epsilon"), (DrGRPO, {"std": "sample"}, "std")],
)
def test_parameters_are_checked(estimator: Estimator, options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        estimator(options)

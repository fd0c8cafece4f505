"""Tests advantages that compare a whole step: whitening, recomputed token by token in plain Python."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from groups import advantages, numbers, of, outcomes, rewarded, turn
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.algorithms.statistics import whitened
from rllm_core.builtin.estimators.batch import PRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rllm_core.types import Trajectory, TrajectoryGroup

eighths = st.integers(-16, 16).map(lambda number: number / 8)  # exact in float32, as token rewards are


def whitened_by_hand(tokens: list[Fraction]) -> list[float]:
    """Whitens the tokens one by one, with exact moments."""
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    return [float(token - mean) / math.sqrt(float(variance) + 1e-8) for token in tokens]


@st.composite
def played(draw: st.DrawFn, *, token_rewards: bool = False) -> TrajectoryGroup:
    """Group of trajectories with several turns, some of them not sampled by the policy."""
    trajectories = []
    for _ in range(draw(st.integers(2, 3))):
        steps = []
        for _ in range(draw(st.integers(1, 3))):
            tokens = draw(st.integers(0, 3))
            given_rewards = draw(st.none() | st.lists(eighths, min_size=tokens, max_size=tokens))
            steps.append(
                turn(
                    tokens,
                    reward=draw(st.none() | eighths),
                    token_rewards=given_rewards if token_rewards else None,
                    sampled=draw(st.integers(0, 3)) > 0,
                )
            )
        trajectories.append(Trajectory(steps=steps, reward=draw(eighths)))
    return of(trajectories)


def sampled(group: TrajectoryGroup, credits: list[list[float | list[float]]]) -> list[float]:
    """Returns the advantages of all sampled tokens, in order."""
    flat: list[float] = []
    for trajectory, of_steps in zip(group.trajectories, credits, strict=True):
        for step, credit in zip(trajectory.steps, of_steps, strict=True):
            if step.weight_version is not None:
                flat += credit if isinstance(credit, list) else [credit] * len(step.completion_ids)
    return flat


def returns_by_hand(trajectory: Trajectory) -> list[list[Fraction]]:
    """Returns, by step and token, the sum of rewards from that token on."""
    later = Fraction(trajectory.reward) if trajectory.reward is not None else Fraction(0)
    result = []
    for step in reversed(trajectory.steps):
        if trajectory.reward is None and step.reward is not None:
            later += Fraction(step.reward)
        of_step = []
        for position in reversed(range(len(step.completion_ids))):
            if step.token_rewards is not None:
                later += Fraction(float(step.token_rewards[position]))
            of_step.append(later)
        result.append(of_step[::-1])
    return result[::-1]


@given(st.lists(played(token_rewards=True), min_size=1, max_size=3), st.booleans())
def test_reinforce_plus_plus_is_whitened_returns_token_by_token(groups: list[TrajectoryGroup], per_step: bool) -> None:
    if per_step:
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.reward = None
    returns = [
        value
        for group in groups
        for trajectory in group.trajectories
        for step, of_step in zip(trajectory.steps, returns_by_hand(trajectory), strict=True)
        for value in of_step
        if step.weight_version is not None
    ]
    result = advantages(ReinforcePlusPlus, *groups)
    flat = [value for group, credits in zip(groups, result, strict=True) for value in sampled(group, credits)]
    if len(set(returns)) < 2:
        assert flat == [0.0] * len(returns)
    else:
        assert flat == pytest.approx(whitened_by_hand(returns), abs=1e-6)


@given(st.lists(played(), min_size=1, max_size=3))
def test_reinforce_plus_plus_baseline_is_whitened_over_tokens(groups: list[TrajectoryGroup]) -> None:
    tokens = []
    for group in groups:
        mean = statistics.mean(Fraction(t.total_reward) for t in group.trajectories)
        for trajectory in group.trajectories:
            sizes = [len(step.completion_ids) for step in trajectory.steps if step.weight_version is not None]
            tokens += [Fraction(trajectory.total_reward) - mean] * sum(sizes)
    result = advantages(ReinforcePlusPlusBaseline, *groups)
    flat = [value for group, credits in zip(groups, result, strict=True) for value in sampled(group, credits)]
    if len(set(tokens)) < 2:
        assert flat == [0.0] * len(tokens)
    else:
        assert flat == pytest.approx(whitened_by_hand(tokens), abs=1e-6)


@given(st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_prpo_compares_all_trajectories_of_the_step(rewards: list[list[int]]) -> None:
    flat = [Fraction(reward) for group in rewards for reward in group]
    mean, std = statistics.mean(flat), math.sqrt(float(statistics.pvariance(flat)))
    result = outcomes(PRPO, *rewards)
    expected = [[float(reward - mean) / (std + 1e-6) if std else 0.0 for reward in group] for group in rewards]
    for got, wanted in zip(result, expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-9)


def test_whitened_tokens_have_mean_0_and_variance_1() -> None:
    groups = [rewarded([1.0, 0.0, 0.5], [3, 5, 2]), rewarded([0.0, 0.25], [7, 1])]
    for estimator in (ReinforcePlusPlus, ReinforcePlusPlusBaseline):
        result = advantages(estimator, *groups)
        flat = [value for group, credits in zip(groups, result, strict=True) for value in sampled(group, credits)]
        assert statistics.mean(flat) == pytest.approx(0, abs=1e-12)
        assert statistics.variance(flat) == pytest.approx(1, abs=1e-6)


def test_longer_responses_weigh_more() -> None:
    short, long = outcomes_of_lengths([1, 1]), outcomes_of_lengths([1, 9])
    assert short[0] == -short[1]
    assert long[0] > -long[1] > 0, "nine of ten tokens pull the mean towards their reward"


def outcomes_of_lengths(lengths: list[int]) -> list[float]:
    [result] = advantages(ReinforcePlusPlus, rewarded([1.0, 0.0], lengths))
    return [value for [value] in result]


def test_tokens_nobody_sampled_have_no_say() -> None:
    def group(unsampled_tokens: int, unsampled_reward: float) -> TrajectoryGroup:
        told = turn(unsampled_tokens, reward=unsampled_reward, sampled=False)
        return of([Trajectory(steps=[turn(2, reward=1.0)]), Trajectory(steps=[told, turn(3, reward=0.25)])])

    for estimator in (ReinforcePlusPlus, ReinforcePlusPlusBaseline):
        few, many = (numbers(estimator()([group(tokens, 0.0)])) for tokens in (1, 50))
        for one, other in zip(few[0], many[0], strict=True):
            assert one[-1] == other[-1], "of the step that was sampled"
    # a reward of a step the policy did not sample still counts for the sampled steps before it
    before = of(
        [Trajectory(steps=[turn(1), turn(1, reward=1.0, sampled=False)]), Trajectory(steps=[turn(1)], reward=0)]
    )
    [[first, second]] = advantages(ReinforcePlusPlus, before)
    assert first[0] > 0 > second[0]


def test_a_single_token_cannot_be_compared() -> None:
    assert outcomes(ReinforcePlusPlus, [1.0]) == [[0.0]]
    assert whitened(np.array([3.0, 5.0]), np.array([0.0, 1.0])).tolist() == [0.0, 0.0]


def test_a_number_per_turn_is_enough_without_rewards_of_tokens() -> None:
    """A list per token would take as much memory as the whole batch."""
    plain = [[turn(2, reward=1.0), turn(1, reward=0.5)], [turn(1)]]
    with_token = [[turn(2, reward=1.0, token_rewards=[0.0, 0.0]), turn(1, reward=0.5)], [turn(1)]]
    first, second = (of([Trajectory(steps=a), Trajectory(steps=b, reward=0.0)]) for a, b in (plain, with_token))
    [[per_turn, _]] = ReinforcePlusPlus()([first])
    [[per_token, other]] = ReinforcePlusPlus()([second])
    assert isinstance(per_turn, np.ndarray)
    assert per_turn.shape == (2,)
    assert isinstance(per_token, list)
    assert isinstance(other, np.ndarray)
    assert [part.tolist() for part in per_token] == [[per_turn[0]] * 2, [per_turn[1]]]

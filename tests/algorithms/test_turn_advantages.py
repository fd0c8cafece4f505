"""Tests returns to go per turn against hand-computed numbers and a second implementation."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from groups import advantages, of, rewarded, turn
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.builtin.estimators.turns import ReturnToGo
from rllm_core.types import PlacedMedia, Trajectory, TrajectoryGroup

Turns = Sequence[tuple[float | None, tuple[int, ...]]]


def played(turns: Sequence[Turns], rewards: Sequence[float | None], *, group_id: int = 0) -> TrajectoryGroup:
    """Makes trajectories from (step reward, prompt) pairs."""
    trajectories = [
        Trajectory(steps=[turn(reward=value, prompt=prompt) for value, prompt in steps], reward=reward)
        for steps, reward in zip(turns, rewards, strict=True)
    ]
    return of(trajectories, group_id=group_id)


def scaled(raw: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = np.array(raw)
    return values / np.sqrt((values**2).mean())


def test_by_hand() -> None:
    # two trajectories of two turns: returns with discount 0.5 are (1 + 0.5 * 2, 2) and (0 + 0.5 * 1, 1)
    pair = played([[(1.0, (1,)), (2.0, (1, 7, 2))], [(0.0, (1,)), (1.0, (1, 7, 3))]], [None, None])
    [result] = advantages(ReturnToGo, pair, discount=0.5)
    assert np.allclose(np.ravel(result), scaled([1.5, 1.0, -1.5, -1.0]))


def test_a_trajectory_reward_comes_at_its_last_turn() -> None:
    with_own = played([[(None, (1,)), (0.5, (2,))], [(None, (1,)), (0.5, (2,))]], [2.0, 1.0])
    spelled = played([[(None, (1,)), (2.5, (2,))], [(None, (1,)), (1.5, (2,))]], [None, None])
    assert advantages(ReturnToGo, with_own) == advantages(ReturnToGo, spelled)


def test_rewards_of_tokens_come_at_their_turn() -> None:
    def group(*turns: list[float] | float) -> TrajectoryGroup:
        steps = [turn(len(t), token_rewards=t, reward=0.0) if isinstance(t, list) else turn(2, reward=t) for t in turns]
        return of([Trajectory(steps=steps), Trajectory(steps=[turn(2, reward=1.0), turn(2, reward=0.0)])])

    assert advantages(ReturnToGo, group([0.5, 0.25], 1.0)) == advantages(ReturnToGo, group(0.75, [1.0, 0.0]))


def test_the_state_baseline_compares_equal_histories_over_all_groups() -> None:
    first = played([[(3.0, (1, 2))], [(0.0, (9, 9))]], [None, None], group_id=0)
    second = played([[(1.0, (1, 2))], [(2.0, (8, 8))]], [None, None], group_id=1)
    result = advantages(ReturnToGo, first, second, baseline="state")
    # (1, 2) occurs twice: 3 - 1 and 1 - 3; (9, 9) and (8, 8) once: minus the mean of all others at that turn
    expected = scaled([3 - 1, 0 - (3 + 1 + 2) / 3, 1 - 3, 2 - (3 + 0 + 1) / 3])
    assert np.allclose(np.ravel(result), expected)


def test_equal_placeholders_of_different_images_are_different_states() -> None:
    def seen(picture: str, reward: float) -> Trajectory:
        media = PlacedMedia(sha256=picture * 64, kind="image", length_tokens=1, start=0)
        return Trajectory(steps=[turn(reward=reward).model_copy(update={"prompt_media": (media,)})])

    same = of([seen("a", 3.0), seen("a", 1.0), seen("b", 2.0), seen("b", 2.0)])
    [result] = advantages(ReturnToGo, same, baseline="state")
    assert np.allclose(np.ravel(result), scaled([2.0, -2.0, 0.0, 0.0]))


def test_a_turn_that_nobody_else_reached_gets_nothing() -> None:
    group = played([[(1.0, (1,)), (5.0, (1, 7, 2))], [(0.0, (1,))]], [None, None])
    [[long, short]] = advantages(ReturnToGo, group)
    assert long[1] == 0.0
    assert long[0] == -short[0] > 0


def test_turns_nobody_sampled_have_no_say() -> None:
    told = turn(reward=0.0, sampled=False)
    group = of([Trajectory(steps=[told, turn(reward=1.0)]), Trajectory(steps=[told, turn(reward=0.0)])])
    [result] = advantages(ReturnToGo, group)
    assert result == [[0.0, 1.0], [0.0, -1.0]], "scaled by the two turns that were sampled"


def test_equal_returns_give_zero() -> None:
    assert advantages(ReturnToGo, rewarded([1.0, 1.0])) == [[[0.0], [0.0]]]


turn_rewards = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=2, max_size=4)


@given(turn_rewards, st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(0)]))
def test_leave_one_out_in_exact_fractions(rewards: list[list[int]], discount: Fraction) -> None:
    group = played([[(float(r), (1,)) for r in of_one] for of_one in rewards], [None] * len(rewards))
    returns: list[list[Fraction]] = []
    for of_one in rewards:
        later, backwards = Fraction(0), []
        for reward in reversed(of_one):
            later = reward + discount * later
            backwards.append(later)
        returns.append(backwards[::-1])
    raw = []
    for index, of_one in enumerate(returns):
        for number, value in enumerate(of_one):
            others = [r[number] for position, r in enumerate(returns) if position != index and len(r) > number]
            raw.append(float(value - sum(others) / len(others)) if others else 0.0)
    [result] = advantages(ReturnToGo, group, discount=float(discount))
    flat = [value for trajectory in result for value in trajectory]
    assert flat == pytest.approx(scaled(raw).tolist() if any(raw) else raw, abs=1e-9)


@given(turn_rewards, st.integers(-4, 4), st.integers(-100, 100))
def test_neither_scale_nor_a_constant_at_the_end_matters(rewards: list[list[int]], power: int, constant: int) -> None:
    def result(scale: float, added: float) -> list[list[list[float]]]:
        turns = [[(scale * r, (1,)) for r in of_one] for of_one in rewards]
        return advantages(ReturnToGo, played(turns, [added] * len(rewards)))

    assert result(2.0**power, 0.0) == result(1.0, 0.0)
    for plain, shifted in zip(result(1.0, 0.0)[0], result(1.0, float(constant))[0], strict=True):
        assert shifted == pytest.approx(plain, abs=1e-9)

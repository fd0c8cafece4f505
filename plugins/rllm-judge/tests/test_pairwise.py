"""Tests scorer ``pairwise``: strengths, both orders, chosen pairs."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

import pytest
from judging import judged, preferring
from rllm_judge.pairwise import Pairwise, bradley_terry, pairs

from rllm_devkit.checks import check_group_scorer

POLICY = {"engine": "policy"}
BY_LENGTH = preferring(lambda answer, place: float(len(answer)))


def test_the_contract_holds() -> None:
    for options in (POLICY, POLICY | {"style": "compact"}):
        results = asyncio.run(check_group_scorer(Pairwise(options)))
        assert not [result for result in results if result.outcome == "failed"], results


def test_strengths_follow_the_judge() -> None:
    answers = ["x" * n for n in (4, 1, 3, 2, 3)]
    scores, services = judged(Pairwise(POLICY), answers, BY_LENGTH)
    assert scores[0] > scores[2] == scores[4] > scores[3] > scores[1]
    assert all(0 < score < 1 for score in scores)
    assert scores[0].parts == {"agreement": 1.0, "comparisons": 3.0}
    assert len(services.asked) == 2 * 6  # four different answers, in both orders


def test_a_preference_for_the_first_place_cancels_and_shows() -> None:
    answers = ["x" * n for n in range(1, 6)]
    first = preferring(lambda answer, place: -float(place))
    scores, _ = judged(Pairwise(POLICY), answers, first)
    assert scores == [pytest.approx(0.5)] * 5
    assert scores[0].parts["agreement"] == 0.0
    single, _ = judged(Pairwise(POLICY | {"passes": 1}), answers, first)
    assert len(set(single)) > 1


def test_who_was_never_compared_is_unscored() -> None:
    scores, _ = judged(Pairwise(POLICY), ["one", "three"], lambda messages: "the first")
    assert scores == [None, None]


def test_a_small_model_answers_with_a_letter() -> None:
    def reply(messages: object) -> str:
        text = str(messages[-1]["content"])  # type: ignore[index]
        first, second = (line for line in text.splitlines() if line[:3] in ("A: ", "B: "))
        return "A" if len(first) > len(second) else "B"

    scores, services = judged(Pairwise(POLICY | {"style": "compact"}), ["longest", "short", "mid-way"[:6]], reply)
    assert scores[0] > scores[2] > scores[1]
    assert len(services.asked[0]) == 1


def test_the_probabilities_are_those_of_bradley_and_terry() -> None:
    strengths = {0: 4.0, 1: 2.0, 2: 1.0, 3: 0.5}
    games = {
        (one, other): [strengths[one] / (strengths[one] + strengths[other])] * 400
        for one, other in itertools.combinations(strengths, 2)
    }
    found = bradley_terry(4, games)
    odds = {number: value / (1 - value) for number, value in found.items()}
    for one, other in itertools.combinations(strengths, 2):
        assert odds[one] / odds[other] == pytest.approx(strengths[one] / strengths[other], rel=0.02)


def test_parts_that_were_not_compared_are_left_out() -> None:
    assert set(bradley_terry(5, {(0, 1): [1.0], (1, 2): [1.0], (3, 4): [1.0]})) == {0, 1, 2}
    assert bradley_terry(3, {}) == {}
    assert bradley_terry(1, {}) == {0: 0.5}


@pytest.mark.parametrize(("size", "each"), [(1, 6), (7, 6), (8, 6), (20, 6), (20, 5), (9, 8)])
def test_chosen_pairs(size: int, each: int) -> None:
    chosen = pairs(size, each, random.Random(size).randrange(100))
    met = Counter(number for pair in chosen for number in pair)
    assert len(set(chosen)) == len(chosen)
    assert all(one < other for one, other in chosen)
    wanted = min(each, size - 1)
    assert all(wanted <= met[number] <= wanted + 1 for number in range(size)) or size == 1

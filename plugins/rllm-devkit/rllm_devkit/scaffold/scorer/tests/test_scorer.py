"""Tests of the group scorer: contract and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from rllm_devkit.checks.group_scorers import ScriptedScorerServices, group_of
from rllm_devkit.contracts import GroupScorerContract

from rllm_placeholder.scorer import PlaceholderScorer


class TestContract(GroupScorerContract):
    """Runs each contract check as a test, with the default options."""

    name = "placeholder"


def ranks(answers: Sequence[str], rewards: Sequence[float]) -> list[float | None]:
    group, services = group_of(answers, rewards=rewards), ScriptedScorerServices(lambda messages: "")
    scores = asyncio.run(PlaceholderScorer().score(group, services))
    return [scores[episode.rollout_id] for episode in group.episodes]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0, 0.5], [0.0, 1.0, 0.5]),
        ([3.0, 7.0, 3.0], [0.25, 1.0, 0.25]),
        ([2.0], [0.5]),
    ],
)
def test_ranks(rewards: list[float], expected: list[float]) -> None:
    assert ranks(["same"] * len(rewards), rewards) == expected


def test_a_shorter_answer_wins() -> None:
    assert ranks(["a long answer", "short"], [1.0, 1.0]) == [0.0, 1.0]


def test_a_rollout_without_a_reward_is_unscored() -> None:
    assert ranks(["first", "second"], [1.0]) == [0.5, None]

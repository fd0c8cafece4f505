"""Tests that the checks of reward functions pass a good one, and find what is wrong with others."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from rllm_core.sandbox import ChildRaised, ChildTimeout
from rllm_core.services import RewardFunction
from rllm_core.types import Task
from rllm_devkit.checks import check_reward_function
from rllm_devkit.checks.rewards import REWARD_CHECKS

TASKS = [Task(task_id=word, data={"answer": word}) for word in ("yes", "no")]


async def right(task: Task, text: str) -> float:
    return float(text == task.data["answer"])


async def cannot_read_numbers(task: Task, text: str) -> float:
    if len(text) > 4_000 and text.isdigit():
        raise ChildRaised("ValueError: Exceeds the limit for integer string conversion")
    return 0.0


async def is_slow(task: Task, text: str) -> float:
    if "**" in text:
        raise ChildTimeout("exceeded 10 s")
    return 0.0


async def is_no_number(task: Task, text: str) -> float:
    value = math.nan if not text else 1.0
    if math.isnan(value):
        raise ValueError("reward function 'mine' returned nan, not a finite number")
    return value


def counting() -> RewardFunction:
    calls = itertools.count()

    async def reward(task: Task, text: str) -> float:
        return float(next(calls))

    return reward


def outcomes(reward: RewardFunction, tasks: list[Task] = TASKS) -> dict[str, str]:
    return {result.name: result.outcome for result in asyncio.run(check_reward_function(reward, tasks))}


def test_a_good_function_passes() -> None:
    assert outcomes(right) == dict.fromkeys(REWARD_CHECKS, "passed")


def test_without_tasks_nothing_is_checked() -> None:
    assert outcomes(right, []) == dict.fromkeys(REWARD_CHECKS, "skipped")


@pytest.mark.parametrize(
    ("reward", "failing"),
    [
        (cannot_read_numbers, {"hostile texts"}),
        (is_slow, {"hostile texts"}),
        (is_no_number, set(REWARD_CHECKS)),
        (counting(), {"repeatable"}),
    ],
    ids=["raises", "slow", "nan", "counts"],
)
def test_what_is_wrong_is_found(reward: RewardFunction, failing: set[str]) -> None:
    assert {name for name, outcome in outcomes(reward).items() if outcome == "failed"} == failing


def test_a_failure_names_task_text_and_cause() -> None:
    found = asyncio.run(check_reward_function(cannot_read_numbers, TASKS))
    [failed] = [result for result in found if result.outcome == "failed"]
    assert "task 'yes'" in failed.detail
    assert "text '9999" in failed.detail
    assert "Exceeds the limit" in failed.detail

"""Tests of the reward function: contract, and rewards of some answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rllm_core.types import Task
from rllm_devkit.contracts import RewardFunctionContract

from rllm_placeholder.reward import score

EXAMPLES = [json.loads(line) for line in Path(__file__).with_name("examples.jsonl").read_text("utf-8").splitlines()]


class TestContract(RewardFunctionContract):
    """Runs each contract check as a test, with hostile texts as answers to these tasks."""

    name = "placeholder"
    tasks = tuple(EXAMPLES[:4])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("abcd", 1.0),
        (" abcd\n", 1.0),
        ("abdc", 0.25),
        ("dcba", 0.0),
        ("", 0.0),
        ("abcdabcd", 0.25),
        ("I say abcd", 0.0),
    ],
)
def test_the_reward(text: str, reward: float) -> None:
    assert score(Task(task_id="1", data={"answer": "abcd"}), text) == reward


def test_right_answers_are_preferred() -> None:
    for number, row in enumerate(EXAMPLES):
        task = Task(task_id=str(number), data=row)
        assert score(task, row["answer"]) > score(task, row["answer"][::-1])

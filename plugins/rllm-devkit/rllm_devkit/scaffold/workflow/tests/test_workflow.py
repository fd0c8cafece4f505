"""Tests of the workflow: contract, splits and reward."""

from __future__ import annotations

import pytest
from rllm_devkit.contracts import WorkflowContract

from rllm_placeholder.workflow import PlaceholderWorkflow, score


class TestContract(WorkflowContract):
    """Runs each contract check as a test. To check other settings, add ``overrides = ("section.key=value",)``."""

    name = "placeholder"


def test_no_word_is_in_both_splits() -> None:
    workflow = PlaceholderWorkflow()
    train, validation = ({task.task_id for task in workflow.tasks(split)} for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation


@pytest.mark.parametrize(
    ("given", "reward"),
    [("acbd", 1.0), ("acdb", 0.25), ("dbca", 0.0), ("", 0.0), ("acbd.", 0.0), ("acbdacbd", 0.0)],
)
def test_the_reward(given: str, reward: float) -> None:
    assert score(given, "acbd") == reward

"""Tests what the contracts of task samplers and group scorers demand of plugins, and what plugins may not change."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from rllm_core.algorithms.group_scorer import GroupScorer, RolloutGroup
from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.types import Task


def nothing(*_: Any) -> None:
    """Stands for a method."""


@pytest.mark.parametrize(
    ("contract", "methods"),
    [(TaskSampler, ("begin", "next", "state_dict", "load_state_dict")), (GroupScorer, ("score",))],
)
def test_a_class_that_lacks_a_method_cannot_be_used(contract: type[Any], methods: tuple[str, ...]) -> None:
    type("Whole", (contract,), dict.fromkeys(methods, nothing))()
    for lacking in methods:
        part = type("Part", (contract,), {name: nothing for name in methods if name != lacking})
        with pytest.raises(TypeError, match=lacking):
            part()


def test_a_scorer_cannot_exchange_what_it_gets() -> None:
    group = RolloutGroup(task=Task(task_id="t"), episodes=[], is_validation=False, seed=1, run_seed=2)
    with pytest.raises(FrozenInstanceError):
        group.episodes = []  # type: ignore[misc]

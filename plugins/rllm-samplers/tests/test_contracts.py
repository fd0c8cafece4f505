"""Tests every task sampler of the package against the contract."""

from __future__ import annotations

from typing import Any

import pytest
from rllm_samplers.difficulty import Difficulty
from rllm_samplers.mixture import Mixture
from rllm_samplers.stages import Stages

from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_devkit.checks.task_samplers import check_task_sampler
from rllm_devkit.contracts import TaskSamplerContract

STAGES = [{"subsets": ["a"], "until_step": 4}, {"subsets": ["b"], "until_solved": 0.4}, {"subsets": ["a", "b"]}]


class TestUniform(TaskSamplerContract):
    name = "uniform"


class TestDifficulty(TaskSamplerContract):
    name = "difficulty"


class TestMixture(TaskSamplerContract):
    name = "mixture"
    overrides = ("training.sampler_options={weights={a=1, b=0.4}}",)


class TestStages(TaskSamplerContract):
    name = "stages"
    overrides = (
        "training.sampler_options={groups=8, stages=[{subsets=['a'], until_step=4}, "
        "{subsets=['b'], until_solved=0.4}, {subsets=['a', 'b']}]}",
    )


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (Difficulty, {"by": "rewards", "spacing": 3, "memory": 5}),
        (Difficulty, {"spacing": 0}),
        (Difficulty, {"subsets": "subset", "memory": 10}),
        (Mixture, {"by": "number", "weights": {str(number): number for number in range(40)}}),
        (Stages, {"stages": STAGES[:1] + STAGES[2:]}),
    ],
)
def test_other_options(sampler: type[TaskSampler], options: dict[str, Any]) -> None:
    results = check_task_sampler(lambda: sampler(options))
    assert not [result for result in results if result.outcome == "failed"], results

"""Tests of the task sampler: contract and choices."""

from __future__ import annotations

from rllm_core.algorithms.task_sampler import GroupResult
from rllm_devkit.checks.task_samplers import some_tasks
from rllm_devkit.contracts import TaskSamplerContract

from rllm_placeholder.sampler import PlaceholderSampler


class TestContract(TaskSamplerContract):
    """Runs each contract check as a test, with the default options."""

    name = "placeholder"


def result(ordinal: int, position: int, solved: float) -> GroupResult:
    return GroupResult(ordinal, position, "trained", "trained", solved, (solved,), weight_version=0, step=1)


def test_every_task_once_per_pass() -> None:
    sampler = PlaceholderSampler()
    sampler.begin(some_tasks(5), seed=3)
    passes = [sampler.next(5) for _ in range(20)]
    assert {tuple(sorted(one)) for one in passes} == {(0, 1, 2, 3, 4)}
    assert len({tuple(one) for one in passes}) > 10


def test_a_solved_task_rests() -> None:
    sampler = PlaceholderSampler({"rest_passes": 2})
    sampler.begin(some_tasks(4), seed=0)
    for ordinal, position in enumerate(sampler.next(4)):
        sampler.observe(result(ordinal, position, solved=1.0 if position == 2 else 0.5))
    assert sampler.metrics() == {"solved_share": 0.25}
    assert sorted(sampler.next(6)) == [0, 0, 1, 1, 3, 3]
    assert sorted(sampler.next(4)) == [0, 1, 2, 3]


def test_if_all_are_solved_all_come_again() -> None:
    sampler = PlaceholderSampler()
    sampler.begin(some_tasks(2), seed=0)
    for ordinal, position in enumerate(sampler.next(2)):
        sampler.observe(result(ordinal, position, solved=1.0))
    assert sorted(sampler.next(2)) == [0, 1]

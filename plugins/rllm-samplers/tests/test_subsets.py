"""Tests ``mixture`` and ``stages``: shares, ends of stages, and messages about options that do not fit the tasks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rllm_samplers.mixture import Mixture
from rllm_samplers.stages import Stages
from rllm_workflows.dataset import DatasetConfig, DatasetWorkflow

from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler
from rllm_core.errors import ConfigError
from rllm_core.types import Task
from rllm_core.workflow import LazyTasks
from rllm_devkit.checks.task_samplers import some_tasks

TASKS = [*some_tasks(40), *(Task(task_id=f"rare-{n}", data={"number": n, "subset": "rare"}) for n in range(3))]


def begun(sampler: TaskSampler) -> TaskSampler:
    sampler.begin(TASKS, seed=5)
    return sampler


def subsets(positions: Any) -> list[str]:
    return [TASKS[position].data["subset"] for position in positions]


def test_a_mixture_keeps_to_its_weights_at_every_moment() -> None:
    weights = {"a": 6, "b": 3.5, "rare": 0.5}
    drawn = subsets(begun(Mixture({"weights": weights})).next(1000))
    for number in range(1, 1001):
        counts = Counter(drawn[:number])
        assert all(abs(counts[name] - weight / 10 * number) < 1.5 for name, weight in weights.items())
    assert Counter(drawn) == {"a": 600, "b": 350, "rare": 50}


def test_within_a_subset_every_task_comes_once_before_any_comes_again() -> None:
    sampler = begun(Mixture({"weights": {"a": 1, "b": 0, "rare": 1}}))
    drawn = sampler.next(80)
    assert set(subsets(drawn)) == {"a", "rare"}
    of_a = [position for position in drawn if TASKS[position].data["subset"] == "a"]
    assert Counter(of_a[:20]) == Counter(of_a[20:]) == dict.fromkeys(range(0, 40, 2), 1)
    assert of_a[:20] != of_a[20:]
    assert sampler.metrics() == {"passes/a": 2.0, "passes/rare": 40 / 3}


def test_a_subset_may_be_a_column_of_the_rows_of_workflow_dataset(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    levels = ["easy"] * 6 + ["hard"] * 2
    rows.write_text(
        "".join(
            json.dumps({"question": str(n), "answer": "1", "level": level}) + "\n" for n, level in enumerate(levels)
        )
    )
    config = DatasetConfig(train_file=str(rows), reward_columns=("level",), held_out_share=0)
    tasks = DatasetWorkflow(config).tasks("train")
    sampler = Mixture({"by": "row.level", "weights": {"easy": 0, "hard": 1}})
    sampler.begin(tasks, seed=5)
    assert [tasks[position].data["row"]["level"] for position in sampler.next(4)] == ["hard"] * 4
    with pytest.raises(ConfigError, match=r"no such key in its data, but 'question', 'answer', 'row\.level'$"):
        Mixture({"by": "level", "weights": {"easy": 1}}).begin(tasks, seed=5)


def result(ordinal: int, step: int, solved: float | None) -> GroupResult:
    return GroupResult(ordinal, 0, "trained", "trained", solved, (), weight_version=0, step=step)


def test_stages_follow_each_other_by_step() -> None:
    stages = [{"subsets": ["rare"], "until_step": 2}, {"subsets": ["a"], "until_step": 3}, {"subsets": ["a", "b"]}]
    sampler = begun(Stages({"stages": stages}))
    seen = []
    for step in range(1, 6):
        drawn = sampler.next(20)
        seen.append("".join(sorted(set(subsets(drawn)))))
        for number in range(20):
            sampler.observe(result(20 * (step - 1) + number, step, None))
    assert seen == ["rare", "rare", "a", "ab", "ab"]


def test_a_stage_ends_when_enough_of_its_own_groups_are_solved() -> None:
    stages = [{"subsets": ["a"], "until_solved": 0.75}, {"subsets": ["b"], "until_solved": 0.75}, {"subsets": ["rare"]}]
    sampler = begun(Stages({"stages": stages, "groups": 4}))
    sampler.next(8)
    for ordinal, solved in enumerate([1.0, 1.0, 1.0]):
        sampler.observe(result(ordinal, 1, solved))
    assert sampler.metrics() == {"stage": 0.0}, "three groups are too few"
    sampler.observe(result(3, 1, 0.0))
    assert sampler.metrics() == {"stage": 1.0}, "0.75 of four"
    for ordinal in range(4, 8):
        sampler.observe(result(ordinal, 2, 1.0))
    assert sampler.metrics() == {"stage": 1.0}, "groups of the stage before do not count"
    assert set(subsets(sampler.next(4))) == {"b"}
    for ordinal in range(8, 12):
        sampler.observe(result(ordinal, 3, 1.0))
    assert set(subsets(sampler.next(6))) == {"rare"}


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (
            Mixture,
            {},
            "weights is missing: .* number of at least 0 for each subset of the tasks, here a, b, rare; write",
        ),
        (Mixture, {"weights": {}}, r'sampler_options = \{ weights = \{ "a" = 1, "b" = 1, "rare" = 1 \} \}$'),
        (Mixture, {"weights": {"a": 1, "b": 1}}, "weights lacks subset 'rare'; give it a weight, or 0 to leave it out"),
        (Mixture, {"weights": {"c": 1}}, "has 'c'; the subsets of the tasks are a, b, rare"),
        (Mixture, {"weights": {"a": 0, "b": 0, "rare": 0}}, "are all 0; give a subset a positive weight"),
        (Mixture, {"weights": {"a": -1}}, "weights"),
        (Mixture, {"by": "level", "weights": {"a": 1}}, "by = 'level': task 'task-0' has no such key in its data, but"),
        (Stages, {"stages": []}, "stages"),
        (
            Stages,
            {"stages": [{"subsets": ["a"]}, {"subsets": ["b"]}]},
            "never ends; give it until_step or until_solved",
        ),
        (Stages, {"stages": [{"subsets": ["a"], "until_step": 3}]}, "has an end, but no stage follows"),
        (Stages, {"stages": [{"subsets": ["c"]}]}, "has 'c'; the subsets of the tasks are a, b, rare"),
        (
            Stages,
            {"stages": [{"subsets": ["a"], "until_step": 3}, {"subsets": ["b"], "until_step": 3}, {"subsets": ["a"]}]},
            "until_step must grow from stage to stage, but is 3, 3",
        ),
    ],
)
def test_options_that_do_not_fit(sampler: type[TaskSampler], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        begun(sampler(options))


def test_endless_tasks_have_no_subsets() -> None:
    with pytest.raises(ConfigError, match="the training tasks are endless"):
        Mixture({"weights": {"a": 1}}).begin(LazyTasks(lambda number: TASKS[0]), seed=0)


def test_a_checkpoint_with_other_subsets_is_refused() -> None:
    state = begun(Mixture({"weights": {"a": 1, "b": 1, "rare": 1}})).state_dict()
    with pytest.raises(ConfigError, match="the checkpoint has the subsets a, b, rare, but the tasks have a, b"):
        begun(Mixture({"weights": {"a": 1, "b": 1, "rare": 0}})).load_state_dict(state)

"""Tests the averages of `Episode.metrics` in training, validation and evaluation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.providers import TrackerProvider
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import evaluation, launch
from rllm_core.tracker import Tracker
from rllm_core.types import Episode, Task
from rllm_devkit import scripted


class Measured(scripted.ScriptedWorkflow):
    """Every episode reports its task number; even tasks also report a second metric."""

    async def run(self, task: Task, completer: Any) -> Any:
        episode = await super().run(task, completer)
        number = task.data["number"]
        metrics = {"number": float(number)} | ({"even": 4.0} if number % 2 == 0 else {})
        return episode.model_copy(update={"metrics": metrics})


class Collecting(Tracker):
    name: ClassVar[str] = "collecting"
    logged: ClassVar[list[tuple[int, dict[str, float]]]] = []

    def start(self, config: Any, run_dir: str) -> None:
        self.logged.clear()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def finish(self, status: str) -> None:
        pass


class Plugin:
    @hookimpl
    def trackers(self) -> list[TrackerProvider]:
        return [TrackerProvider(name="collecting", load="rllm_devkit.scripted:Collecting", summary="Collects.")]


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(scripted, "ScriptedWorkflow", Measured)
    monkeypatch.setattr(scripted, "Collecting", Collecting, raising=False)
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(Plugin(), "collecting")
    small = ("training.steps=2", "training.groups_per_step=4", "training.rollouts_per_group=2", "say_yes.tasks=4",
             "training.validation_rollouts=10", "training.trackers=['collecting']")  # fmt: skip
    return assemble(load_run_config("say_yes", plugins, overrides=small, backend="scripted"), plugins)


@pytest.mark.slow
def test_of_training_and_validation(assembly: Parts, tmp_path: Path) -> None:
    asyncio.run(launch.train(assembly, tmp_path / "run", resume=False, progress=Progress()))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["workflow/number"] for row in rows] == [1.5, 1.5], "the mean of tasks 0 to 3"
    assert [row["workflow/even"] for row in rows] == [4.0, 4.0], "of those that have it, and of no others"
    validations = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]
    assert [validation["metrics"] for validation in validations] == [{"even": 4.0, "number": 2.0}] * 2
    logged = [metrics["validation/workflow/number"] for _, metrics in Collecting.logged if "validation/step" in metrics]
    assert logged == [2.0, 2.0]
    assert [metrics["workflow/number"] for _, metrics in Collecting.logged if "workflow/number" in metrics] == [1.5] * 2


def test_of_an_evaluation(assembly: Parts) -> None:
    opening = evaluation.engine_of_backend(assembly, None)
    result = asyncio.run(
        evaluation.evaluate(
            assembly.resolved, assembly.host, opening,
            split="validation", task_limit=3, samples=2, ks=(1,),
        )
    )  # fmt: skip
    assert set(result["metrics"]) == {"even", "number"}
    assert result["metrics"]["even"] == 4.0


def test_an_evaluation_reports_the_first_failure_of_each_kind(assembly: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Measured.run

    async def fails_at(self: Measured, task: Task, completer: Any) -> Episode:
        if task.task_id == "validation-1":
            raise ZeroDivisionError("no such number")
        return await run(self, task, completer)

    monkeypatch.setattr(Measured, "run", fails_at)
    result = asyncio.run(
        evaluation.evaluate(
            assembly.resolved, assembly.host, evaluation.engine_of_backend(assembly, None),
            split="validation", task_limit=3, samples=2, ks=(1,),
        )
    )  # fmt: skip
    assert result["failed"] == 2
    [failure] = result["failures"]
    assert (failure["reason"], failure["task"]) == ("error", "validation-1")
    assert failure["count"] == 2 * assembly.config.rollout.max_attempts
    assert "no such number" in failure["error"]

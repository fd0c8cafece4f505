"""Tests of the public workflow checks: compliant workflows pass, and each check fails a noncompliant one."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from noncompliant_workflows import (
    BLOCK_SECONDS,
    BLOCKING,
    HANGING,
    LIMIT_SECONDS,
    NONCOMPLIANT,
    Honest,
    LeavingChildren,
)
from rllm_workflows.calculator import CalculatorWorkflow
from rllm_workflows.countdown import CountdownWorkflow
from rllm_workflows.guess import GuessWorkflow
from rllm_workflows.sort import SortWorkflow

from rllm_core.types import Task
from rllm_core.workflow import LazyTasks, Split, Workflow
from rllm_devkit.checks import CheckResult
from rllm_devkit.checks.provided import run
from rllm_devkit.checks.results import checked
from rllm_devkit.checks.watch import LoopWatch
from rllm_devkit.checks.workflow_probe import WorkflowProbe
from rllm_devkit.checks.workflows import WORKFLOW_CHECKS, check_workflow

PLAYED = ("opening", "episodes")
NEEDED = {check: PLAYED for check in WORKFLOW_CHECKS if check not in ("construction", "settings", "tasks", "splits")}
NEEDED |= {"opening": (), "episodes": ("opening",)}
# The default limit counts time for which a virtual or crowded machine does not run this process at all.
BUSY_SECONDS = 60.0


def some(
    make: Any,
    *checks: str,
    answers: tuple[str, ...] = (),
    seed: int = 0,
    max_block_seconds: float = BUSY_SECONDS,
    rollout_timeout_seconds: float = 60.0,
) -> list[CheckResult]:
    """Runs a few checks."""

    async def found() -> list[CheckResult]:
        with LoopWatch(max_block_seconds) as watch:
            probe = WorkflowProbe(make, answers, seed, 2, rollout_timeout_seconds, watch)
            return await checked(probe, {name: WORKFLOW_CHECKS[name] for name in checks})

    return run(found())


def results(make: Any, **options: Any) -> dict[str, CheckResult]:
    checks = check_workflow(make, max_block_seconds=BUSY_SECONDS, **options)
    return {result.name: result for result in run(checks)}


class Secretive(Honest):
    """Expects an answer that is not in its tasks."""

    def score(self, text: str, task: Task) -> float:
        return float(text == "open sesame")


@pytest.mark.slow
def test_an_honest_workflow_passes_every_check() -> None:
    found = results(Honest)
    assert list(found) == list(WORKFLOW_CHECKS)
    assert {name: result.detail for name, result in found.items() if result.outcome != "passed"} == {}
    assert found["tasks"].detail == "4 train, 4 validation"
    assert "no task is in both splits" in found["splits"].detail
    assert found["groups"].detail == "agent"
    assert "1 tools" in found["tools"].detail


@pytest.mark.slow
@pytest.mark.parametrize("workflow", [SortWorkflow, GuessWorkflow, CalculatorWorkflow, CountdownWorkflow])
def test_the_published_workflows_pass(workflow: type[Workflow]) -> None:
    found = results(workflow)
    assert {name: result.detail for name, result in found.items() if result.outcome == "failed"} == {}
    without_tools = {"tools"} - ({"tools"} if workflow is CalculatorWorkflow else set())
    assert {name for name, result in found.items() if result.outcome == "skipped"} == without_tools


def test_solutions_are_found_in_the_tasks() -> None:
    for workflow in (SortWorkflow, GuessWorkflow):
        assert some(workflow, *PLAYED, "rewards")[-1].detail.endswith("to 1")


def test_an_author_may_say_what_fits() -> None:
    assert some(Secretive, *PLAYED, "rewards", answers=("open sesame",))[-1].detail.endswith("to 1")
    assert some(Secretive, *PLAYED, "rewards")[-1].detail.endswith("to 0")


def test_equal_seeds_see_the_same() -> None:
    seen = [some(GuessWorkflow, *PLAYED, "rewards", seed=seed) for seed in (1, 1, 2, 3)]
    assert seen[0] == seen[1]
    assert any(one != seen[0] for one in seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noncompliant", "check", "words"), NONCOMPLIANT, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_workflow_that_breaks_a_rule_is_caught(noncompliant: Any, check: str, words: str) -> None:
    """The check of the broken rule fails; its prerequisites pass."""

    limits = {
        "max_block_seconds": BLOCK_SECONDS if noncompliant in BLOCKING else BUSY_SECONDS,
        "rollout_timeout_seconds": LIMIT_SECONDS if noncompliant in HANGING else 60.0,
    }
    try:
        *before, found = some(noncompliant, *NEEDED.get(check, ()), check, **limits)
    finally:
        for child in LeavingChildren.left:
            child.kill()
            child.wait()
        LeavingChildren.left.clear()
    assert [result.outcome for result in before] == ["passed"] * len(before), before
    assert (found.name, found.outcome) == (check, "failed")
    assert words in found.detail


def test_questions_that_differ_or_are_one_for_all_pass() -> None:
    def asking(*questions: str) -> type[Honest]:
        class Asked(Honest):
            def tasks(self, split: Split) -> list[Task]:
                return [
                    Task(task_id=f"{split}-{number}", data={"question": question.format(split), "number": number})
                    for number, question in enumerate(questions, 0 if split == "train" else 10)
                ]

        return Asked

    [found] = some(asking("one of {}", "two of {}"), "splits")
    assert (found.outcome, found.detail) == ("passed", "no task is in both splits, and no question")
    assert [found.outcome for found in some(asking("guess", "guess"), "splits")] == ["passed"]


@pytest.mark.slow
def test_endless_tasks_pass() -> None:
    class Endless(Honest):
        def tasks(self, split: Split) -> LazyTasks:
            return LazyTasks(lambda number: Task(task_id=f"{split}-{number}", data={"number": number, "answer": split}))

    found = some(Endless, "tasks", "splits", *PLAYED)
    assert [result.outcome for result in found] == ["passed"] * 4, found
    assert found[0].detail == "endless train, endless validation"


def test_every_check_has_caught_somebody() -> None:
    assert {check for _, check, _ in NONCOMPLIANT} == set(WORKFLOW_CHECKS)


def test_a_workflow_that_never_asks_is_not_asked_to_survive_answers() -> None:
    class Reading(Honest):
        samples = False

        async def run(self, task: Task, completer: Any) -> Any:
            return self.episode(task, [], reward=0.0)

    found = results(Reading)
    skipped = {name for name, result in found.items() if result.outcome == "skipped"}
    assert {"cut-off answers", "hostile answers", "tools", "engine errors", "cancellation"} == skipped
    assert not any(result.outcome == "failed" for result in found.values())


def test_where_nothing_can_be_played_the_rest_is_skipped() -> None:
    class Broken(Honest):
        async def run(self, task: Task, completer: Any) -> Any:
            raise KeyError("number")

    found = results(Broken)
    assert [name for name, result in found.items() if result.outcome == "failed"] == ["episodes"]
    assert "KeyError: 'number' (test_workflow_checks.py:" in found["episodes"].detail
    assert found["hostile answers"].detail == "no rollout could be run"


def test_signals_are_as_before_and_other_threads_need_none() -> None:
    def passes() -> bool:
        return [result.outcome for result in some(Honest, *PLAYED)] == ["passed"] * 2

    before = signal.getsignal(signal.SIGALRM)
    assert passes()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(passes()))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_cancellation_by_the_caller_is_one() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(check_workflow(Honest))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())

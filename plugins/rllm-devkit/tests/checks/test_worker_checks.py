"""Tests of the worker checks: two workers pass, and each noncompliant one fails its check."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm_core.builtin.process_host import Processes
from rllm_core.config import RunConfig
from rllm_core.hosts.contract import HostedWorkflow, RolloutHost
from rllm_core.hosts.inline import Inline
from rllm_core.runs.launch import opened
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Task
from rllm_devkit.checks import check_worker, workers
from rllm_devkit.checks.workers import REFERENCE, WORKER_CHECKS
from rllm_devkit.reference import Reference
from rllm_devkit.scripted import ScriptedEngine

FOLDER = Path(__file__).parent
STANDALONE = FOLDER / "standalone_worker.py"
LONG_SECONDS = 60.0
SHORT_SECONDS = 4.0  # what never comes is waited for


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-m", "rllm_core.hosts.worker"), (sys.executable, "-I", str(STANDALONE))],
    ids=["the core's", "standalone"],
)
def test_workers_pass(command: tuple[str, ...]) -> None:
    results = asyncio.run(check_worker(command, seconds=LONG_SECONDS))
    assert [result.name for result in results] == list(WORKER_CHECKS)
    assert [result for result in results if result.outcome != "passed"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "name", "detail"),
    [
        ("other version", "ready", "it speaks version 2"),
        ("silent", "opening", "a Opened did not come"),
        ("opens anything", "refusals", "instead of a Broken, it said Opened"),
        ("no reward", "one call", "the episode has one trajectory"),
        ("sends everything", "turns", "keeps 0 messages, but the run has 2"),
        ("without tokens", "turns", "the workflow saw tokens"),
        ("keeps too much", "edits", "but the workflow said"),
        ("equal seeds", "forks", "the seeds of the forks"),
        ("repeats tools", "tools", "repeats the tools"),
        ("trusts tools", "failed calls", "leaves out its tools"),
        ("assumes tools", "failed calls", "leaves out its tools"),
        ("no call", "failed calls", "but Failed has call None"),
        ("one reason", "failures", "'max_turns_exceeded'"),
        ("late answers", "given up", "no call waits for this"),
        ("no cancel", "cancellation", "did not come"),
        ("no cancelling", "cancellation", "must say Cancelling, then Failed"),
        ("mixes", "two at once", "a call says"),
        ("settles early", "settled", "while a rollout computes"),
        ("miscounts", "settled", "no Settled with that number"),
        ("never settles", "settled", "the last had none"),
        ("floats", "data", "echo is"),
        ("strict", "unknown fields", "news"),
        ("reads once", "frames", "did not come|instead of"),
        ("prints", "output", "its output"),
        ("no closed", "closing", "instead of a Closed"),
        ("never exits", "end of input", "it did not exit"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_caught(
    worker: str, name: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WORKER_CHECKS", {name: WORKER_CHECKS[name]})
    command = [sys.executable, str(FOLDER / "noncompliant_workers.py"), worker]
    [result] = asyncio.run(check_worker(command, seconds=SHORT_SECONDS))
    assert result.outcome == "failed", result
    assert any(words in result.detail for words in detail.split("|")), result


def test_a_command_that_does_not_exist_is_named() -> None:
    results = asyncio.run(check_worker(["/nowhere/worker"]))
    assert {result.outcome for result in results} == {"failed"}
    assert all("/nowhere/worker cannot be started" in result.detail for result in results)


ASKS = [["say", "main", {"role": "user", "content": "one"}], ["ask", "main"]]
TASKS: dict[str, list[Any]] = {
    "turns": ASKS * 3,
    "edited": [*ASKS, *ASKS, ["keep", "main", 1], ["ask", "main"], ["reward", 0, 2.0]],
    "forks": [["fork", "main", "a"], ["fork", "a", "b"], *ASKS, ["quote", "b", 0], ["ask", "b", "main"]],
    "limits": [["limit", "main", 2], *ASKS, ["limit", "main", None], *ASKS],
    "gives up": [["give_up", "main"], *ASKS],
    "fails": [*ASKS, ["fail", "no reward"]],
    "ends": [*ASKS, ["end", "max_turns_exceeded", "enough"]],
}


@pytest.mark.slow
def test_a_standalone_worker_plays_the_episodes_of_a_run(tmp_path: Path) -> None:
    """It takes the place of the interpreter in the real host."""
    program = tmp_path / "worker"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{STANDALONE}"\n', encoding="utf-8")
    program.chmod(0o755)
    assert played(Processes, workers=2, python=str(program)) == played(Inline)


def played(host: type[RolloutHost], **rollout: Any) -> list[Any]:
    """Plays `TASKS`, and returns what the run has of each."""
    limits = {"max_response_tokens": 40, "max_attempts": 1}
    config = RunConfig.model_validate({"workflow": "reference", "rollout": {**limits, **rollout}})
    at = host(HostedWorkflow(workflow=Reference(), load=REFERENCE), config.rollout)
    runner = RolloutRunner(at, ScriptedEngine(), config, lockstep=True)

    async def run() -> list[Episode]:
        async with opened(at, config, print, settled=runner.merger.settled):
            tasks = [Task(task_id=name, data={"do": do, "reward": 1.0}) for name, do in TASKS.items()]
            runs = [runner.run(task, RolloutKey("train", number, 0)) for number, task in enumerate(tasks)]
            return [rollout.episode for rollout in await asyncio.gather(*runs)]

    shown = []
    for episode in asyncio.run(run()):
        steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
        tokens = [(step.prompt_ids.tolist(), step.completion_ids.tolist(), step.reward) for step in steps]
        error = (episode.error or "").rpartition("RuntimeError")[2]
        shown.append((episode.task_id, episode.termination_reason.value, episode.metadata.get("seen"), tokens, error))
    return shown

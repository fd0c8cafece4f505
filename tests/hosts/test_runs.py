"""Tests of whole runs whose rollouts happen in workers: real backend, the same numbers as in the process of the run."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forked import Forked, Forks
from hosted import WORKFLOWS

import rllm_core
from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.training import requests
from rllm_core.types import Episode, Task
from rllm_core.workflow import Workflow
from rllm_viewer.commands.show import show
from rllm_viewer.verify import verify

SMALL: dict[str, Any] = {
    "training": {"steps": 3, "groups_per_step": 4, "rollouts_per_group": 4, "validation_rollouts": 16},
    "training.checkpoint_every_steps": 1,
}
MCP = {
    "calculator.servers": {
        name: {"command": [sys.executable, "-m", "rllm_workflows.mcp_example_server", name]}
        for name in ("sums", "products")
    }
}


def metrics(folder: Path) -> bytes:
    """The lines of all steps."""
    return (folder / "metrics.jsonl").read_bytes()


def train(folder: Path, workflow: str, *, resume: bool = False, **settings: Any) -> Path:
    """Trains, and returns the folder."""
    return rllm_core.train(workflow, SMALL | settings, run_dir=folder, resume=resume).path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "settings", "numbers"),
    [
        ("sort", {}, (1, 3)),
        ("guess", {}, (2,)),
        ("calculator", {}, (1,)),
        pytest.param("calculator", MCP, (2,), id="calculator-mcp"),
        ("solver_judge", {}, (2,)),
        ("math", {}, (1,)),
    ],
)
def test_workers_change_no_number(
    workflow: str, settings: dict[str, Any], numbers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch samples without the rollouts whose tools take longer, which changes the last digits.
    monkeypatch.setattr(requests, "LOCKSTEP_OUTSIDE_SECONDS", 120.0)
    settings = {"training.steps": 2, "training.validation_rollouts": 4} | settings
    inline = train(tmp_path / "inline", workflow, **settings)
    for workers in numbers:
        where = {"rollout.host": "processes", "rollout.workers": workers}
        folder = train(tmp_path / str(workers), workflow, **settings, **where)
        assert metrics(folder) == metrics(inline)
        summary = json.loads((folder / "summary.json").read_text())
        said = f"{workers} processes" if workers > 1 else "1 process"
        assert summary["rollout_host"]["where"] == said
        assert f"rollouts ran in {said}\n" in CliRunner().invoke(show, [str(folder)]).output
        assert verify(folder).problems == []


@pytest.mark.slow
def test_a_batch_has_all_calls_that_a_worker_has_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last ones that it sends before it waits, where a rollout has several calls at once."""
    flush, batches = requests.RequestMerger._flush, []

    def recorded(merger: requests.RequestMerger) -> None:
        batches[-1].append(sorted(seed for equal in merger._pending.values() for call in equal for seed in call.seeds))
        flush(merger)

    monkeypatch.setattr(requests.RequestMerger, "_flush", recorded)
    for host in ({}, {"rollout.host": "processes", "rollout.workers": 2}):
        batches.append([])
        train(tmp_path / str(len(batches)), "solver_judge", **{"training.steps": 2}, **host)
    assert batches[0] == batches[1]


@pytest.mark.slow
def test_a_resumed_run_is_equal(tmp_path: Path) -> None:
    """Stopped in workers, continued in the process, and the other way round."""
    constant = {"optimizer.schedule": "constant", "algorithm.entropy_coefficient": 0.0}
    whole = train(tmp_path / "whole", "guess", **constant)
    for first, then in (("processes", "inline"), ("inline", "processes")):
        folder = train(tmp_path / first, "guess", **constant, **{"training.steps": 2, "rollout.host": first})
        train(folder, str(folder / "run.toml"), resume=True, **constant, **{"training.steps": 3, "rollout.host": then})
        assert metrics(folder) == metrics(whole)


def test_a_workflow_says_where_it_can_run(tmp_path: Path) -> None:
    for settings, message in (
        (
            {"rollout.host": "inline", "rollout.workers": 2},
            r"rollout\.workers has no effect with rollout\.host = 'inline'",
        ),
        ({"rollout.host": "nowhere"}, "no rollout host named 'nowhere'"),
    ):
        with pytest.raises(Exception, match=message):
            train(tmp_path / "run", "sort", **settings)


def test_a_class_of_a_notebook_stays_in_its_process(tmp_path: Path) -> None:
    class Mine(Workflow):
        def tasks(self, split: str) -> list[Task]:
            return []

        async def run(self, task: Task, completer: Completer) -> Episode:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="write it to a file"):
        rllm_core.train(Mine, {**SMALL, "rollout.host": "processes"}, run_dir=tmp_path / "run")


KILLED = """
import asyncio, json, sys
import rllm_core
from rllm_local.backend import LocalBackend
update = LocalBackend.update_policy

async def held(self, step):
    while step.step > int(sys.argv[4]):
        await asyncio.sleep(0.01)
    return await update(self, step)

LocalBackend.update_policy = held
settings = json.loads(sys.argv[2])
resume = sys.argv[3] == "resume"
rllm_core.train("guess" if not resume else None, None if resume else settings, run_dir=sys.argv[1], resume=resume)
"""


def start(forking: Forks, folder: Path, how: str, settings: dict[str, Any], last: int = 1000) -> Forked:
    """Starts a run in a process of its own, which goes no further than the step ``last``."""
    program = folder.with_name("killed.py")
    program.write_text(KILLED)
    arguments = [str(folder), json.dumps(settings), how, str(last)]
    return forking.start(arguments, program=str(program), output=folder.with_name("output"))


def workers_of(pid: int) -> list[int]:
    """Pids of the workers of a run."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"hosts.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def steps_done(folder: Path) -> int:
    """Number of optimizer steps so far."""
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.by_hand)])
def test_killed_workers_leave_the_books_complete(forking: Forks, tmp_path: Path, kills: int) -> None:
    """Workers are killed at random moments; the run ends as if nothing had happened, with more attempts."""
    generator = random.Random(0)
    # Asynchronous, so that rollouts run all the time; as many steps as the kills need.
    settings = SMALL | {
        "training.steps": 8 + 4 * kills, "training.staleness_threshold": 1, "local.generation": "separated",
        "rollout.host": "processes", "rollout.workers": 2, "rollout.max_attempts": 1000,
    }  # fmt: skip
    folder = tmp_path / "run"
    run = start(forking, folder, "train", settings)
    try:
        killed = 0
        while killed < kills and run.poll() is None:
            before = steps_done(folder)
            if before and (workers := workers_of(run.pid)):
                os.kill(generator.choice(workers), signal.SIGKILL)
                killed += 1
                while steps_done(folder) < before + 2 and run.poll() is None:
                    time.sleep(0.02)
            moment, steps = time.monotonic() + generator.uniform(0, 0.2), steps_done(folder)
            while time.monotonic() < moment and steps_done(folder) == steps:  # a fast machine has steps left at the end
                time.sleep(0.01)
        assert run.wait() == 0
    finally:
        run.send_signal(signal.SIGKILL)
    summary = json.loads((folder / "summary.json").read_text())
    assert killed == kills
    assert summary["status"] == "completed"
    assert summary["rollout_host"]["restarts"] == kills
    assert summary["retries"] == summary["rollout_host"]["lost_rollouts"]
    assert verify(folder).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.by_hand)])
def test_a_killed_driver_can_resume(forking: Forks, tmp_path: Path, kills: int) -> None:
    settings = SMALL | {"rollout.host": "processes", "rollout.workers": 2, "training.steps": 3 + 2 * kills}
    whole = train(tmp_path / "whole", "guess", **(settings | {"rollout.host": "inline", "rollout.workers": None}))
    folder, how = tmp_path / "run", "train"
    for number in range(kills):
        run = start(forking, folder, how, settings, last=3 + 2 * number)  # so that it has not ended before it is killed
        how = "resume"
        while steps_done(folder) < 2 + 2 * number and run.poll() is None:
            time.sleep(0.01)
        workers = workers_of(run.pid)
        assert workers
        run.send_signal(signal.SIGKILL)
        run.wait()
        deadline = time.monotonic() + 600
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert start(forking, folder, "resume", settings).wait() == 0
    assert json.loads((folder / "summary.json").read_text())["resumed_from_step"] > 0
    assert metrics(folder) == metrics(whole)
    assert verify(folder).problems == []


@pytest.mark.slow
def test_workers_from_a_thread(tmp_path: Path) -> None:
    """A notebook trains in the event loop of another thread."""
    found: list[Path] = []
    where = {"rollout.host": "processes", "rollout.workers": 1, "training.steps": 1}
    thread = threading.Thread(target=lambda: found.append(train(tmp_path / "run", "sort", **where)))
    thread.start()
    thread.join()
    assert steps_done(found[0]) == 1


@pytest.mark.slow
def test_a_workflow_of_a_file_learns_in_workers(tmp_path: Path) -> None:
    settings = {"rollout.host": "processes", "rollout.workers": 2, "training.steps": 1}
    folder = train(tmp_path / "run", f"{WORKFLOWS}:Talk", **settings)
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"

"""Tests that a rollout which damages its worker costs only its worker, and that nothing is left running."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hosted import WORKFLOWS, play

from rllm_core.builtin.process_host import Processes
from rllm_core.errors import PluginError, RunError
from rllm_core.types import Task

LONG_SECONDS = 600.0


def is_running(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits until a condition holds."""
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("exit", "exit code 3"),
        ("kill", "SIGKILL"),
        ("memory", "rollout.worker_memory_bytes"),
        ("flood", "printed more than"),
    ],
)
def test_a_lost_worker_is_named_and_replaced(task: str, how: str, tmp_path: Path) -> None:
    """Each bad rollout has a worker of its own; the others end."""
    played = play(
        "Fault", ["fine", task, "fine"], workers=2, rollouts_per_worker=1, max_attempts=2, folder=tmp_path / "workers",
        worker_memory_bytes=256 << 20,
    )  # fmt: skip
    first, bad, last = played.episodes
    assert (first.termination_reason.value, last.termination_reason.value) == ("done", "done")
    assert bad.termination_reason.value == "worker_lost"
    assert how in (bad.error or "")
    assert len(played.rollouts[1].failed) == 1, "it was tried again"
    assert played.report.restarts == played.report.lost_rollouts == 2
    assert any(how in note for note in played.notes)


@pytest.mark.slow
def test_the_last_output_of_a_lost_worker_is_kept(tmp_path: Path) -> None:
    played = play("Fault", ["kill"], workers=1, max_attempts=1, folder=tmp_path / "workers")
    assert "the last words" in (played.episodes[0].error or "")
    [log] = (tmp_path / "workers").iterdir()
    assert "the last words" in log.read_text()


@pytest.mark.slow
def test_a_crash_in_native_code_is_located() -> None:
    played = play("Fault", ["crash"], workers=1, max_attempts=1)
    error = played.episodes[0].error or ""
    assert re.search(r"SIGSEGV\) at \S*workflows\.py:\d+ in run\(\); its last output: the last words$", error)


@pytest.mark.slow
def test_the_stack_of_a_blocked_worker_is_no_output_of_its_own() -> None:
    played = play("Fault", ["spin"], workers=1, max_attempts=1, rollout_timeout_seconds=1)
    [lost] = [note for note in played.notes if "blocked its worker" in note]
    assert "last output" not in lost


@pytest.mark.slow
def test_a_rollout_whose_worker_is_lost_is_played_again(tmp_path: Path) -> None:
    tasks = [Task(task_id=f"kill_once-{n}", data={"marker": str(tmp_path / "died")}) for n in range(8)]
    played = play("Fault", tasks, workers=2)
    assert {episode.termination_reason.value for episode in played.episodes} == {"done"}
    lost = [episode for rollout in played.rollouts for episode in rollout.failed]
    assert lost
    assert {episode.termination_reason.value for episode in lost} == {"worker_lost"}
    assert played.report.lost_rollouts == len(lost)


class LosesFirst(Processes):
    """Loses its first worker between the choice of the worker and the start of the rollout."""

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Any]:
        async with super().place() as worker:
            if worker.number == 1:
                worker.lose("lost by a test")
            yield worker


@pytest.mark.slow
def test_a_rollout_whose_worker_is_lost_before_it_starts_is_counted() -> None:
    played = play("Fault", ["fine"], host=LosesFirst, workers=1)
    assert played.episodes[0].termination_reason.value == "done"
    [lost] = played.rollouts[0].failed
    assert "lost by a test" in (lost.error or "")
    assert played.report.lost_rollouts == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["spin", "sleep", "stubborn"])
def test_a_rollout_that_does_not_end_is_killed_and_named(task: str) -> None:
    """One that blocks the event loop of its worker, in Python or in C, or ignores its cancellation."""
    played = play("Fault", [task, "fine"], workers=2, rollouts_per_worker=1, max_attempts=1, rollout_timeout_seconds=3)
    bad, fine = played.episodes
    assert fine.termination_reason.value == "done"
    assert bad.termination_reason.value == "timeout"
    assert "workflows.py:" in (bad.error or ""), bad.error
    assert "its worker was killed" in (bad.error or "")
    assert played.report.restarts == 1


@pytest.mark.slow
def test_a_rollout_that_waits_is_cancelled_and_keeps_its_worker() -> None:
    played = play("Fault", ["waits", "fine"], workers=1, max_attempts=1, rollout_timeout_seconds=3)
    waits, fine = played.episodes
    assert fine.termination_reason.value == "done"
    assert waits.termination_reason.value == "timeout"
    assert "workflows.py:" in (waits.error or "")
    assert played.report.restarts == 0


@pytest.mark.slow
def test_a_workflow_that_kills_every_worker_ends_the_run() -> None:
    with pytest.raises(RunError, match=r"workers in a row were lost .* exit code 3"):
        play("Fault", [f"exit-{n}" for n in range(40)], workers=2, rollouts_per_worker=1, max_attempts=3)


@pytest.mark.slow
def test_a_workflow_that_cannot_be_opened_ends_the_run() -> None:
    with pytest.raises(PluginError, match=r"workflows\.py:.*no server"):
        play("DoesNotOpen", ["plain"], workers=2)


def test_an_interpreter_without_the_core_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho no module named rllm_core >&2\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(PluginError, match="no module named rllm_core"):
        play("Talk", ["plain"], workers=1, python=str(bare))


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    from rllm_core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"rollout.python = '/nowhere/python'"):
        play("Talk", ["plain"], workers=1, python="/nowhere/python")


def test_what_a_rollout_prints_is_no_message() -> None:
    assert play("Fault", ["prints"], workers=1).episodes[0].termination_reason.value == "done"


@pytest.mark.slow
def test_each_worker_opens_the_workflow_once_and_never_imports_torch() -> None:
    played = play("Opens", ["plain"] * 8, workers=2)
    pids = {episode.metadata["pid"] for episode in played.episodes}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert sum("it does not close" in note for note in played.notes) == 2
    assert not any(episode.metadata["torch"] for episode in play("Fault", ["fine"], workers=1).episodes)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_a_worker_is_replaced_after_enough_rollouts() -> None:
    played = play("Fault", ["fine"] * 6, workers=1, rollouts_per_worker=1, replace_worker_after_rollouts=2)
    pids = [episode.metadata["pid"] for episode in played.episodes]
    assert len(set(pids)) == 3
    assert played.report.restarts == 0, "none was lost"


@pytest.mark.slow
def test_rollouts_that_change_their_process_do_not_meet() -> None:
    """As many at once as one after the other."""
    tasks = [Task(task_id=f"draw-{n}", data={"seed": n}) for n in range(16)]
    at_once = play("GlobalState", tasks, workers=4, rollouts_per_worker=1)
    one_by_one = play("GlobalState", tasks, workers=1, rollouts_per_worker=1)
    assert [e.metadata for e in at_once.episodes] == [e.metadata for e in one_by_one.episodes]


@pytest.mark.slow
def test_cancelling_everything_leaves_nothing_running(tmp_path: Path) -> None:
    """The processes that a rollout has started end with it, too."""
    pids = tmp_path / "pids"

    async def kill_workers(host: Any) -> None:
        while not pids.is_file() or len(pids.read_text().split()) < 4:
            await asyncio.sleep(0.02)
        for worker in list(host.workers):
            os.kill(worker.pid, signal.SIGKILL)

    tasks = [Task(task_id=f"children-{n}", data={"pids": str(pids)}) for n in range(2)]
    played = play("Fault", tasks, workers=2, rollouts_per_worker=1, max_attempts=1, during=kill_workers)
    assert {episode.termination_reason.value for episode in played.episodes} == {"worker_lost"}
    assert eventually(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


DRIVER = """
import sys
sys.path.insert(0, {support!r})
from rllm_core.types import Task
from hosted import play
tasks = [Task(task_id=f"children-{{n}}", data={{"pids": {pids!r}}}) for n in range(2)]
play("Fault", [*tasks, "spin"], workers=3, rollouts_per_worker=1)
"""


@pytest.mark.slow
def test_when_the_driver_dies_all_workers_end(tmp_path: Path) -> None:
    """Also one that blocks, and what rollouts have started."""
    pids = tmp_path / "pids"
    support = str(WORKFLOWS.parent.parent / "support")
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.format(support=support, pids=str(pids))])
    try:
        assert eventually(lambda: pids.is_file() and len(pids.read_text().split()) == 4)
        workers = [int(pid) for pid in Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()]
        assert len(workers) == 4, "three workers and their keeper"
    finally:
        driver.kill()
        driver.wait()
    everything = {*workers, *map(int, pids.read_text().split())}
    assert eventually(lambda: not any(is_running(pid) for pid in everything))


def test_a_worker_that_speaks_something_else_is_named(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nprintf '\\000\\000\\000\\003abc'\nsleep 60\n")
    other.chmod(0o755)
    with pytest.raises(PluginError, match="not one of the protocol"):
        play("Talk", ["plain"], workers=1, python=str(other))
    assert Processes.name == "processes"

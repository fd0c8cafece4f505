"""Tests that Ctrl-C saves a checkpoint, in a program and in a running event loop, and that the run can be resumed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked, Forks

import rllm_core
from rllm_core.run_folder import checkpoint

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, sys
from pathlib import Path
import rllm_core
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Letters(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{word}", data={"word": word}) for word in ("abc", "bca", "cab")]

    async def run(self, task, completer):
        if sys.argv[1] == "evaluate":
            print("evaluating", flush=True)
            await asyncio.sleep(3600)
        while Path("hold").exists() and Path("run/checkpoints/step-000003").exists():
            await asyncio.sleep(0.01)
        step = await completer.complete([{"role": "user", "content": task.data["word"]}])
        return self.episode(task, [step], reward=float(len(step.text) > 2))


SETTINGS = {"training": {"steps": 9, "groups_per_step": 2, "rollouts_per_group": 2, "validation_rollouts": 2,
            "checkpoint_every_steps": 3}}


async def in_a_loop(call):
    return call()


def main():
    call = {
        "train": lambda: rllm_core.train(Letters, SETTINGS, backend="local", run_dir="run"),
        "resume": lambda: rllm_core.train(Letters, run_dir="run", resume=True),
        "evaluate": lambda: rllm_core.evaluate(Letters, SETTINGS, backend="local"),
    }[sys.argv[1]]
    try:
        result = asyncio.run(in_a_loop(call)) if sys.argv[2] == "loop" else call()
    except KeyboardInterrupt:
        print("interrupted as a user of Python expects")
        sys.exit(7)
    print(result.status)


main()
"""


Start = Callable[..., Forked]


@pytest.fixture(scope="module")
def start(forking: Forks) -> Start:
    """``start(folder, *arguments)``: starts the program in a folder."""

    def started(folder: Path, *arguments: str) -> Forked:
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        return forking.start(arguments, program="program.py", folder=folder, output=folder / "-".join(arguments))

    return started


def interrupted(start: Start, folder: Path, where: str, number: signal.Signals) -> Forked:
    """Starts a training, and sends it a signal after its first checkpoint, from which it is held until then."""
    (folder / "hold").touch()
    process = start(folder, "train", where)
    while not checkpoint.complete(folder / "run" / "checkpoints"):
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(number)
    process.wait()
    (folder / "hold").unlink()
    return process


@pytest.fixture(scope="module")
def uninterrupted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder, "train", "plain")
    assert process.wait() == 0, process.err
    return (folder / "run" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("where", ["plain", "loop"])
def test_ctrl_c_saves_and_the_run_continues(start: Start, tmp_path: Path, where: str, uninterrupted: bytes) -> None:
    process = interrupted(start, tmp_path, where, signal.SIGINT)
    assert (process.returncode, process.out) == (7, "interrupted as a user of Python expects\n"), process.err
    assert "SIGINT received: saving a checkpoint" in process.err
    assert "to continue: rllm_core.train(Letters, run_dir='run', resume=True)" in process.err
    run = rllm_core.Run(tmp_path / "run")
    assert run.status == "interrupted"
    newest = int(checkpoint.complete(run.path / "checkpoints")[-1].name[5:])
    assert newest == run.summary["optimizer_steps"] < 9
    process = start(tmp_path, "resume", where)
    assert (process.wait(), process.out) == (0, "completed\n"), process.err
    assert run.summary["resumed_from_step"] == newest
    assert (run.path / "metrics.jsonl").read_bytes() == uninterrupted


@pytest.mark.parametrize("where", ["plain", "loop"])
def test_sigterm_saves_too(start: Start, tmp_path: Path, where: str) -> None:
    process = interrupted(start, tmp_path, where, signal.SIGTERM)
    assert process.returncode == 1
    assert process.err.splitlines()[-1].endswith("Interrupted: interrupted by SIGTERM")
    assert rllm_core.Run(tmp_path / "run").status == "interrupted"


@pytest.mark.parametrize("where", ["plain", "loop"])
def test_ctrl_c_ends_an_evaluation(start: Start, tmp_path: Path, where: str) -> None:
    process = start(tmp_path, "evaluate", where)
    while not process.out.startswith("evaluating\n"):
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 7, process.err
    assert process.out.endswith("interrupted as a user of Python expects\n")
    assert "Traceback" not in process.err

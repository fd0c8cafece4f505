"""Tests signals outside of a training run, which saves a checkpoint of its own, and closed standard streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from forked import Forks

from rllm_core.cli import cli
from rllm_core.cli.groups import LazyGroup
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import signals
from rllm_core.training.stopping import Interrupted

ENVIRONMENT = """
import asyncio, sys
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Waits(Workflow):
    def tasks(self, split):
        return [Task(task_id=split, data={})]

    async def close(self):
        print("closed", file=sys.stderr)

    async def run(self, task, completer):
        print("playing", file=sys.stderr, flush=True)
        await asyncio.sleep(3600)
"""
SOME_WAIT = """
import asyncio, sys
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class SomeWait(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{number}", data={"number": number}) for number in range(4)]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": "hi"}])
        if task.data["number"] > 1:
            print("playing", file=sys.stderr, flush=True)
            await asyncio.sleep(3600)
        return self.episode(task, [step], reward=float(task.data["number"]))
"""
SLOW_TO_CLOSE = """
import asyncio, sys
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class SlowToClose(Workflow):
    def tasks(self, split):
        return [Task(task_id=split, data={})]

    async def close(self):
        print("closing", file=sys.stderr, flush=True)
        await asyncio.sleep(3600)

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": "hi"}])
        return self.episode(task, [step], reward=0.5)
"""


@pytest.mark.parametrize("arguments", [["train", "sort"], ["plugins", "show", "sort"]])
def test_ctrl_c_in_any_command_has_its_exit_code(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its modules are imported and its run file is read: the documented code is 130, not 1 (failed)."""

    def get_command(self: LazyGroup, ctx: click.Context, name: str) -> click.Command:
        raise KeyboardInterrupt

    monkeypatch.setattr(LazyGroup, "get_command", get_command)
    ended = CliRunner().invoke(cli, arguments)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "interrupted by SIGINT\n")


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    program = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "rllm_core.cli.entry":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from rllm_core.cli import main
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted by SIGINT\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_the_workflow_of_an_evaluation(forking: Forks, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text(ENVIRONMENT)
    process = forking.start(["eval", "waits.py", "--backend", "local"], folder=tmp_path, output=tmp_path / "output")
    while process.err != "playing\n":
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == 128 + number
    playing, received, closed, interrupted = process.err.splitlines()
    assert (playing, closed, interrupted) == ("playing", "closed", f"interrupted by {number.name}")
    assert received.startswith(f"{number.name} received: ")


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_evaluation_keeps_what_has_finished(forking: Forks, tmp_path: Path, as_json: bool) -> None:
    (tmp_path / "some_wait.py").write_text(SOME_WAIT)
    arguments = ["eval", "some_wait.py", "--backend", "local", "-o", "rollout.max_concurrent_rollouts=1"]
    process = forking.start([*arguments, *["--json"] * as_json], folder=tmp_path, output=tmp_path / "output")
    while "playing" not in process.err:
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.err.endswith("\ninterrupted by SIGINT\n")
    if as_json:
        result = json.loads(process.out)
        assert (result["unfinished"], result["failed"], result["reward_mean"]) == (2, 0, 0.5)
        return
    first, finished, reward, *_ = process.out.splitlines()
    finished, _, _ = finished.partition(";")
    assert first.endswith("some_wait.py (validation): 4 tasks x 1 rollout, 0 failed")
    assert (finished, reward) == ("interrupted: 2 of 4 rollouts finished", "reward 0.500")


@pytest.mark.slow
def test_a_signal_while_an_evaluation_shuts_down_keeps_its_result(forking: Forks, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_CLOSE)
    process = forking.start(
        ["eval", "slow.py", "--backend", "local", "--json"], folder=tmp_path, output=tmp_path / "output"
    )
    while "closing" not in process.err:
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert process.err.endswith("\ninterrupted by SIGTERM\n")
    result = json.loads(process.out)
    assert (result["unfinished"], result["failed"], result["reward_mean"]) == (0, 0, 0.5)


@pytest.mark.slow
def test_a_second_signal_while_an_evaluation_shuts_down_keeps_its_result(forking: Forks, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(
        SLOW_TO_CLOSE.replace("await asyncio.sleep(3600)", "__import__('time').sleep(3600)")
    )
    process = forking.start(
        ["eval", "blocks.py", "--backend", "local", "--json"], folder=tmp_path, output=tmp_path / "output"
    )
    while "closing" not in process.err:
        assert process.poll() is None, process.err
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(signals.REPEATED_SECONDS)
    assert process.wait() == 128 + signal.SIGINT
    assert json.loads(process.out)["reward_mean"] == 0.5


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_passed_on_twice_counts_once(again: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` sends SIGTERM to a command and to its group, which would otherwise end a run without a checkpoint."""
    left: list[int] = []
    monkeypatch.setattr(signals, "leave", left.append)

    async def signalled(*numbers: signal.Signals) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        await asyncio.sleep(3600)

    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        asyncio.run(signals.until_signalled(signalled(signal.SIGTERM, again)))
    assert (caught.value.exit_code, left) == (143, [])


def test_a_second_signal_ends_a_command_whose_event_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(signals, "leave", left.append)
    monkeypatch.setattr(signals, "REPEATED_SECONDS", 0.0)

    async def blocked() -> tuple[int, ...]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return tuple(left)

    assert asyncio.run(signals.until_signalled(blocked())) == (130,)


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [(">&- 2>&-", "--version", 0), ("2>/dev/full", "train no_such_workflow", 2)],
)
def test_the_exit_code_does_not_depend_on_who_reads(closed: str, arguments: str, code: int) -> None:
    command = f'"{sys.executable}" -m rllm_core {arguments} {closed}'
    assert subprocess.run(["sh", "-c", command], check=False, stdin=subprocess.DEVNULL).returncode == code


def test_json_that_cannot_be_written_is_an_error_in_one_line() -> None:
    command = [sys.executable, "-m", "rllm_core", "plugins", "--json"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: OSError: [Errno 28]")
    assert ended.stderr.count("\n") == 1


def test_a_signal_is_answered_while_a_call_blocks_the_event_loop() -> None:
    noted: list[str] = []

    class Notes(Progress):
        def note(self, text: str) -> None:
            noted.append(text)

    async def blocked() -> None:
        with signals.Signals(Notes()), contextlib.suppress(asyncio.CancelledError):
            signal.raise_signal(signal.SIGINT)
            deadline = time.monotonic() + 60
            while not noted and time.monotonic() < deadline:
                time.sleep(0.01)  # without an await
            assert len(noted) == 1
            await asyncio.sleep(60)

    asyncio.run(blocked())
    assert all("SIGINT received" in text for text in noted)

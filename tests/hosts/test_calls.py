"""Tests of calls and rollouts that got no answer: what the worker says next, and what the run does meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hosted import play

from rllm_core.engine import EngineError, TITOCompleter
from rllm_core.hosts import wire
from rllm_core.hosts.remote_completer import RemoteCompleter, SampledSteps
from rllm_core.hosts.run_side_rollout import PlayedRollout
from rllm_core.scope import RolloutScope
from rllm_core.types import Step, Task, TokenOutput
from rllm_devkit.scripted import ScriptedEngine
from tests.hosts.workflows import CALLED, TOOLS


def test_a_call_after_one_that_failed_names_its_tools_again() -> None:
    """The run may have kept the tools of the failed call."""
    calls: list[wire.ModelCall] = []

    async def ask(call: wire.ModelCall) -> wire.SampledStep:
        calls.append(call)
        if len(calls) == 2:
            raise EngineError("503")
        return wire.SampledStep(str(len(calls)), {"role": "assistant"}, 0, b"", b"", None, "stop", 0)

    async def talk() -> list[Step]:
        completer = RemoteCompleter(wire.Start(1, "0-0", "task", {}, 0), RolloutScope(), ask, SampledSteps())
        messages = [{"role": "user", "content": "add"}]
        steps = [await completer.complete(messages, tools=TOOLS)]
        with pytest.raises(EngineError):
            await completer.complete(messages)
        steps += [await completer.complete(messages, tools=TOOLS) for _ in range(2)]
        return [*steps, await completer.fork(after=steps[0]).complete(messages, tools=[])]

    assert [step.tools for step in asyncio.run(talk())] == [TOOLS, TOOLS, TOOLS, []]
    assert [call.tools for call in calls] == [TOOLS, None, TOOLS, msgspec.UNSET, []]


def test_a_call_after_one_that_was_given_up_waits_for_an_engine_that_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer, calls, called = ScriptedEngine.get_token_outputs_from_token_input, [], tmp_path / "called"
    monkeypatch.setenv(CALLED, str(called))

    async def slow(self: ScriptedEngine, *arguments: Any, seeds: Sequence[int], **options: Any) -> list[TokenOutput]:
        calls.append(seeds)
        if len(calls) == 1:
            called.touch()
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.2)
        return await answer(self, *arguments, seeds=seeds, **options)

    monkeypatch.setattr(ScriptedEngine, "get_token_outputs_from_token_input", slow)
    [episode] = play("Talk", ["gives_up_in_engine"], workers=1, max_attempts=1).episodes
    assert episode.termination_reason.value == "done", episode.error
    assert len(calls) == 2


@pytest.mark.slow
def test_nothing_is_reported_twice_when_a_rollout_that_blocks_loses_its_worker() -> None:
    """Its timeout is its error; asyncio must not report the loss as an exception that nobody wanted."""
    reported: list[dict[str, Any]] = []

    async def listen(host: Any) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    played = play("Fault", ["sleep"], workers=1, max_attempts=1, rollout_timeout_seconds=1, during=listen)
    assert played.episodes[0].termination_reason.value == "timeout"
    del played
    gc.collect()
    assert reported == []


@pytest.mark.slow
def test_a_run_that_ends_while_a_worker_is_replaced_leaves_none() -> None:
    """The new one is just starting when the host is closed."""
    processes: list[subprocess.Popen[bytes]] = []

    async def kill_last(host: Any) -> None:
        while not any(worker.rollouts for worker in host.workers):
            await asyncio.sleep(0.01)
        start = host.start_worker

        async def slowly(worker: Any) -> None:
            await asyncio.sleep(0.3)
            await start(worker)
            processes.append(worker.link._process)

        host.start_worker = slowly
        os.kill(host.workers[0].pid, signal.SIGKILL)

    played = play("Fault", ["waits"], workers=1, max_attempts=1, during=kill_last)
    assert played.episodes[0].termination_reason.value == "worker_lost"
    assert processes, "it was replaced"
    assert [process for process in processes if process.returncode is None] == []


@pytest.mark.parametrize("kept", [-1, 1])
def test_a_call_keeps_messages_that_the_conversation_has(kept: int) -> None:
    async def ask() -> list[Any]:
        sent: list[Any] = []
        rollout = PlayedRollout(7, Task(task_id="task"), TITOCompleter(ScriptedEngine()), sent.append)
        rollout.receive(wire.ModelCall(7, 1, [], kept, [{"role": "user", "content": "add"}]))
        while not sent:
            await asyncio.sleep(0)
        return sent

    [answer] = asyncio.run(ask())
    assert f"the conversation has 0 messages so far, not {kept}" in answer.message

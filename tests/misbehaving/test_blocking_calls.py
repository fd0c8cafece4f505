"""Rollouts that block the event loop for a moment are noted; other work on the event loop is not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from rllm_core.limits import blocking_calls
from rllm_core.limits.blocking_calls import noting_blocking_calls
from rllm_core.plugins.blame import Frame


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set whenever the watching thread looks at what blocks."""
    monkeypatch.setattr(blocking_calls, "BLOCK_SECONDS", 0.05)
    event, stack_of = threading.Event(), blocking_calls.stack_of

    def stack_and_tell(frame: FrameType | None) -> list[Frame]:
        event.set()
        return stack_of(frame)

    monkeypatch.setattr(blocking_calls, "stack_of", stack_and_tell)
    return event


async def blocks_until(is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(0.2)  # more than the watching thread waits for an answer
        await asyncio.sleep(0)


def wait_for_the_watching_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "blocking calls":
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_each_function_that_blocks_is_noted_once(looked: threading.Event) -> None:
    notes: list[str] = []

    async def other(is_over: Callable[[], bool]) -> None:
        while not is_over():
            time.sleep(0.2)
            await asyncio.sleep(0)

    async def run() -> None:
        with noting_blocking_calls(notes.append):
            await asyncio.create_task(blocks_until(lambda: len(notes) == 1), name="rollout train-0-0-0-0 of task 'a'")
            looked.clear()
            await asyncio.create_task(blocks_until(looked.is_set), name="rollout train-0-0-1-0 of task 'a'")
            await asyncio.create_task(other(lambda: len(notes) > 1), name="rollout train-0-1-0-0 of task 'b'")

    asyncio.run(run())
    first, second = notes
    assert "rollout train-0-0-0-0 of task 'a' blocks the event loop at" in first
    assert "in blocks_until()" in first
    assert "rollout train-0-1-0-0 of task 'b' blocks the event loop at" in second
    assert "in other()" in second


def test_a_backend_may_work_on_the_event_loop(looked: threading.Event) -> None:
    notes: list[str] = []

    async def run() -> None:
        with noting_blocking_calls(notes.append):
            await asyncio.create_task(blocks_until(looked.is_set), name="training")

    asyncio.run(run())
    wait_for_the_watching_thread()
    assert notes == []


def test_a_run_that_ends_while_the_loop_is_asked_leaves_no_thread(looked: threading.Event) -> None:
    async def run() -> None:
        with noting_blocking_calls(lambda line: None):
            await blocks_until(looked.is_set)

    asyncio.run(run())
    wait_for_the_watching_thread()

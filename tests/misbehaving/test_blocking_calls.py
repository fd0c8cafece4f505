"""Rollouts that block the event loop for a moment are noted; other work on the event loop is not."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from rllm_core.limits import blocking_calls
from rllm_core.limits.blocking_calls import noting_blocking_calls
from rllm_core.limits.guard import stack_of
from rllm_core.plugins.blame import Frame


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set whenever the watching thread looks at what blocks."""
    monkeypatch.setattr(blocking_calls, "BLOCK_SECONDS", 0.05)
    event = threading.Event()

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


def test_many_rollouts_that_start_at_once_do_not_block(
    looked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them takes long, and the user cannot change that there are many."""
    monkeypatch.setattr(blocking_calls, "BLOCK_SECONDS", 0.5)  # far more than one of them takes
    notes: list[str] = []

    async def is_short() -> None:
        time.sleep(0.01)

    async def run() -> None:
        with noting_blocking_calls(notes.append):
            while not looked.is_set():
                await asyncio.gather(*(asyncio.create_task(is_short(), name=f"rollout {n}") for n in range(200)))

    asyncio.run(run())
    wait_for_the_watching_thread()
    assert notes == []


def test_the_program_that_waits_for_the_event_loop_is_no_part_of_a_stack() -> None:
    async def works() -> set[str]:
        return {frame.function for frame in stack_of(sys._getframe())}

    def has_its_own_loop() -> set[str]:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(works())

    async def run() -> set[str]:
        asyncio.events._set_running_loop(None)  # as a library does that lets loops nest
        return has_its_own_loop()

    assert "works" in (alone := asyncio.run(works()))
    assert {"works", "has_its_own_loop", "run"} <= (nested := asyncio.run(run()))
    assert sys._getframe().f_code.co_name not in alone | nested


def test_a_run_that_ends_while_the_loop_is_asked_leaves_no_thread(looked: threading.Event) -> None:
    async def run() -> None:
        with noting_blocking_calls(lambda line: None):
            await blocks_until(looked.is_set)

    asyncio.run(run())
    wait_for_the_watching_thread()

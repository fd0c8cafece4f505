"""Tests that a large portion of messages keeps neither a run nor a worker from anything else."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import pytest

from rllm_core.engine import Completer
from rllm_core.hosts import wire
from rllm_core.hosts.pacing import Paced
from rllm_core.hosts.worker import MESSAGES_PER_TICK, WorkerSession
from rllm_core.types import Episode, Task
from rllm_core.workflow import Workflow


def test_items_are_handled_in_order_and_a_few_per_tick() -> None:
    async def ticks() -> list[list[int]]:
        handled: list[int] = []
        paced: Paced[int] = Paced(handled.append, 3)
        paced.add(range(4))
        paced.add(range(4, 7))
        seen: list[list[int]] = []
        while len(handled) < 7:
            await asyncio.sleep(0)
            seen.append(handled[:])
        paced.add([7])
        await asyncio.sleep(0)
        return [*seen, handled]

    assert [len(seen) for seen in asyncio.run(ticks())] == [3, 6, 7, 8]
    assert asyncio.run(ticks())[-1] == list(range(8))


def test_an_item_that_fails_does_not_keep_the_others_from_being_handled() -> None:
    async def handled() -> list[int]:
        loop, seen, failed = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda loop, context: failed.append(context["exception"]))
        paced: Paced[int] = Paced(lambda item: seen.append(6 // item), 2)
        paced.add([1, 0, 2, 3])
        for _ in range(4):
            await asyncio.sleep(0)
        assert [type(error) for error in failed] == [ZeroDivisionError]
        return seen

    assert asyncio.run(handled()) == [6, 3, 2]


class Computing(Workflow):
    """Computes before it calls the model, and notes how many frames had been sent then."""

    name = "computing"
    sent: ClassVar[list[bytes]] = []
    seen: ClassVar[list[int]] = []

    def tasks(self, split: Any) -> list[Task]:
        return []

    async def run(self, task: Task, completer: Completer) -> Episode:
        self.seen.append(len(self.sent))
        until = time.monotonic() + 0.005
        while time.monotonic() < until:
            pass
        await completer.complete([{"role": "user", "content": "hello"}])
        raise AssertionError("nobody answers")


@pytest.mark.slow
def test_a_call_does_not_wait_for_what_other_rollouts_of_the_worker_compute() -> None:
    Computing.sent, Computing.seen = [], []

    async def play() -> None:
        session = WorkerSession(Computing.sent.append)
        session.receive(wire.encoded([wire.Open(wire.VERSION, f"{__name__}:Computing", {})]))
        while len(Computing.sent) < 2:  # ready, opened
            await asyncio.sleep(0)
        session.receive(wire.encoded([wire.Start(number, "", "task", {}, 0) for number in range(4)]))
        while len(Computing.seen) < 4:
            await asyncio.sleep(0)

    asyncio.run(play())
    before = Computing.seen[0]
    assert Computing.seen == [before, before + 1, before + 2, before + 3], "each call was sent before the next rollout"


def test_a_worker_reads_between_rollouts_that_go_on_in_the_same_moment() -> None:
    Computing.sent, Computing.seen = [], []
    many = 3 * MESSAGES_PER_TICK

    async def started_when_read() -> int:
        session = WorkerSession(Computing.sent.append)
        session.receive(wire.encoded([wire.Open(wire.VERSION, f"{__name__}:Computing", {})]))
        while len(Computing.sent) < 2:
            await asyncio.sleep(0)
        session.receive(wire.encoded([wire.Start(number, "", "task", {}, 0) for number in range(many)]))
        while not Computing.seen:
            await asyncio.sleep(0)
        return len(Computing.seen)

    assert 0 < asyncio.run(started_when_read()) <= MESSAGES_PER_TICK

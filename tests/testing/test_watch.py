"""What holds the event loop up is told apart from a machine that has other things to do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rllm_core.testing.watch import Blocked, LoopWatch

SPIN = "while True: pass"
WORK_SECONDS = 0.5


@pytest.fixture
def crowded() -> Iterator[None]:
    """One processor for this process and three others that never rest."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]  # they inherit it
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, before)


def calculates() -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < WORK_SECONDS:
        pass


def sleeps() -> None:
    time.sleep(WORK_SECONDS)


def standstill(callback: Callable[[], None], limit_seconds: float) -> float:
    """How long a callback holds the event loop up, as the watch counts it."""

    async def watched() -> float:
        with LoopWatch(limit_seconds) as watch:
            await asyncio.sleep(0)
            with watch.rollout():
                callback()
            return watch.since()

    return asyncio.run(watched())


@pytest.mark.parametrize("callback", [calculates, sleeps])
def test_what_calculates_or_sleeps_is_interrupted(callback: Callable[[], None]) -> None:
    with pytest.raises(Blocked, match=r"stood still for more than 0\.2 s"):
        standstill(callback, 0.2)


def test_waiting_for_a_processor_does_not_count(crowded: None) -> None:
    """By the wall clock this takes two seconds at least: each of the four gets a quarter of the processor."""
    counted = standstill(calculates, 1.0)
    assert WORK_SECONDS / 2 < counted < 1.0


def test_sleeping_counts_on_a_busy_machine_too(crowded: None) -> None:
    with pytest.raises(Blocked):
        standstill(sleeps, 0.2)

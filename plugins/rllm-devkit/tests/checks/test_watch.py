"""Tests that a blocked event loop is distinguished from a busy machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rllm_devkit.checks.watch import Blocked, LoopWatch

SPIN = "while True: pass"
WORK_SECONDS = 0.5


@pytest.fixture
def crowded() -> Iterator[None]:
    """Runs this process and three busy ones on a single processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(3)]  # they inherit the affinity
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
    """Returns how long a callback blocks the event loop, according to the watch."""

    async def watched() -> float:
        with LoopWatch(limit_seconds) as watch:
            await asyncio.sleep(0)
            with watch.rollout():
                callback()
            return watch.since()

    return asyncio.run(watched())


@pytest.mark.parametrize("callback", [calculates, sleeps])
def test_what_calculates_or_sleeps_is_interrupted(callback: Callable[[], None]) -> None:
    with pytest.raises(Blocked, match=r"was blocked for more than 0\.2 s"):
        standstill(callback, 0.2)


def test_waiting_for_a_processor_does_not_count(crowded: None) -> None:
    """The wall clock shows at least two seconds, because four processes share the processor."""
    counted = standstill(calculates, 1.0)
    assert WORK_SECONDS / 2 < counted < 1.0


def test_sleeping_counts_on_a_busy_machine_too(crowded: None) -> None:
    with pytest.raises(Blocked):
        standstill(sleeps, 0.2)

"""Tests that a blocked event loop is distinguished from a busy machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllm_devkit.checks import watch
from rllm_devkit.checks.watch import Blocked, LoopWatch, awake

SPIN = "while True: pass"
WORK_SECONDS = 0.5
PATIENCE_SECONDS = 300.0


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
    """Sleeps for some seconds, not counting those in which it is awake and waits for a processor."""
    begun, deadline = awake(), time.monotonic() + PATIENCE_SECONDS
    while awake() - begun < WORK_SECONDS:
        assert time.monotonic() < deadline, "sleep does not count"
        time.sleep(WORK_SECONDS)


def standstill(callback: Callable[[], None], limit_seconds: float) -> float:
    """Returns how long a callback blocks the event loop, according to the watch."""

    async def watched() -> float:
        with LoopWatch(limit_seconds) as watching:
            await asyncio.sleep(0)
            with watching.rollout():
                callback()
            return watching.since()

    return asyncio.run(watched())


@pytest.mark.parametrize("callback", [calculates, sleeps])
def test_what_calculates_or_sleeps_is_interrupted(callback: Callable[[], None]) -> None:
    with pytest.raises(Blocked, match=r"was blocked for more than 0\.2 s"):
        standstill(callback, 0.2)


def test_sleeping_counts_on_a_busy_machine_too(crowded: None) -> None:
    with pytest.raises(Blocked):
        standstill(sleeps, 0.2)


@pytest.mark.slow
def test_waiting_for_a_processor_does_not_count(crowded: None) -> None:
    """Four processes share the processor, so it waits for about three times as long as it calculates.

    What the watch leaves out is compared, not what it counts: that includes times in which the machine stood still.
    """
    begun = time.monotonic()
    counted = standstill(calculates, PATIENCE_SECONDS)
    passed = time.monotonic() - begun
    assert counted > WORK_SECONDS / 2
    assert passed - counted > 2 * WORK_SECONDS


class Clocks:
    """The clocks of the watch, which a test moves.

    Attributes:
        seconds: What the wall clock shows.
    """

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = file
        self.seconds = 0.0
        self.wait(0.0)
        monkeypatch.setattr(watch, "SCHEDULER", file)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def wait(self, seconds: float) -> None:
        """Lets time pass in which the thread waits for a processor, in all ``seconds`` so far."""
        self._file.write_text(f"0 {round(seconds * 1e9)} 0\n")


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(tmp_path / "schedstat", monkeypatch)


def test_only_what_was_not_spent_waiting_is_too_long(clocks: Clocks) -> None:
    def looks() -> None:
        clocks.wait(99.5)
        clocks.seconds = 100.0
        signal.raise_signal(signal.SIGALRM)

    def looks_again() -> None:
        looks()
        clocks.seconds = 100.75
        signal.raise_signal(signal.SIGALRM)

    counted = standstill(looks, 1.0)
    assert counted == pytest.approx(0.5 - LoopWatch.TICK_SECONDS)
    clocks.seconds = 0.0
    clocks.wait(0.0)
    with pytest.raises(Blocked, match="more than 1 s"):
        standstill(looks_again, 1.0)


def test_a_wait_between_two_looks_at_the_clocks_does_not_count(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> float:
        if clocks.seconds == 0.0:
            clocks.seconds = 5.0
            clocks.wait(5.0)
        return clocks.seconds

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=interrupted))
    assert awake() == 0.0

"""Detects third-party code that blocks the event loop or leaves resources behind."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

from rllm_devkit.checks.results import Violation

SETTLED_SECONDS = 2.0
SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, turns


class Blocked(BaseException):
    """The event loop was blocked too long. Raised in the blocking code; a BaseException, so it is rarely caught."""


class LoopWatch:
    """Interrupts code that blocks the event loop for longer than a limit while a rollout is running.

    No single clock suffices: on a busy machine, the wall clock includes time spent waiting for a processor, and the
    thread's CPU clock excludes sleep. So the watch counts wall-clock time minus the time the thread waited for a
    processor, as reported by the system. Computing and sleeping count in full; waiting for other processes does not.

    Signals reach only the main thread. In other threads, the watch only measures blocking and does not interrupt it.

    Args:
        limit_seconds: Maximum time for a callback, in seconds.
    """

    TICK_SECONDS: ClassVar[float] = 0.01

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.longest_seconds = 0.0
        self._running = 0
        self._last = awake()
        self._timer: asyncio.TimerHandle | None = None
        self._before: Any = None
        self._has_signals = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def __enter__(self) -> Self:
        self._last = awake()
        self._tick()
        if self._has_signals:
            self._before = signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, self.limit_seconds / 4, self.limit_seconds / 4)
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_signals:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Marks the time in which a rollout runs."""
        if not self._running:
            self._last = awake()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._note()

    def since(self) -> float:
        """Returns the longest blocking, in seconds, since the last call."""
        longest, self.longest_seconds = self.longest_seconds, 0.0
        return longest

    def _tick(self) -> None:
        if self._running:
            self._note()
        self._last = awake()
        self._timer = asyncio.get_running_loop().call_later(self.TICK_SECONDS, self._tick)

    def _note(self) -> None:
        self.longest_seconds = max(self.longest_seconds, awake() - self._last - self.TICK_SECONDS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._running and awake() - self._last > self.limit_seconds:
            self._last = awake()
            raise Blocked(f"the event loop was blocked for more than {self.limit_seconds:g} s")


def awake() -> float:
    """Returns wall-clock seconds minus the time this thread waited for a processor, if the system reports it."""
    waited = _waited()
    while True:
        now, before = time.monotonic(), waited
        waited = _waited()
        if waited == before:  # otherwise the thread waited between the two readings
            return now - waited / 1e9


def _waited() -> int:
    """Returns the nanoseconds this thread waited for a processor; 0 if the system does not report them."""
    try:
        return int(SCHEDULER.read_text(encoding="ascii").split()[1])
    except (FileNotFoundError, IndexError):
        return 0  # not Linux, or a kernel without these statistics


def held() -> dict[str, int]:
    """Counts tasks, threads and child processes, without the threads of the event loop's pool."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return {"tasks": len(asyncio.all_tasks()), "threads": len(threads), "child processes": child_processes()}


def child_processes() -> int:
    """Counts child processes that have not been waited for; 0 if the system does not report them."""
    count = 0
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            count += len(path.read_text(encoding="utf-8").split())
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended; its children now belong to another thread
    return count


async def check_released(before: Mapping[str, int], what: str) -> None:
    """Waits until counts are no higher than before.

    Raises:
        Broken: If they stay higher.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLED_SECONDS
    while grown := [kind for kind, count in held().items() if count > before[kind]]:
        if loop.time() > deadline:
            raise Violation(f"{what} leaves {', '.join(grown)} behind")
        await asyncio.sleep(0.02)

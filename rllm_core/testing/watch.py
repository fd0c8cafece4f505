"""What foreign code does to a process: how long it holds the event loop up, and what it leaves behind."""

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

from rllm_core.testing.parsers import Broken

SETTLED_SECONDS = 2.0
SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, turns


class Blocked(BaseException):
    """The event loop stood still for too long; raised in the code that holds it up, whatever that catches."""


class LoopWatch:
    """Interrupts whatever holds the event loop up for longer than a limit, while a rollout is running.

    Neither clock would do: on a busy machine the wall clock runs while the thread waits for a processor, and the
    thread's own clock stands still while it sleeps. So what counts is the wall clock less the time in which the thread
    could have run and had no processor, as the system tells it: calculating and sleeping count in full on any
    machine, and waiting for others does not.

    Signals reach only the main thread of a process, so elsewhere it is told when the loop goes on again.

    Args:
        limit_seconds: How long a callback may take.
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
        """A rollout runs in here."""
        if not self._running:
            self._last = awake()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._note()

    def since(self) -> float:
        """The longest standstill since this was asked last, in seconds."""
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
            raise Blocked(f"the event loop stood still for more than {self.limit_seconds:g} s")


def awake() -> float:
    """Seconds of the wall clock, less those in which this thread waited for a processor, where the system tells."""
    try:
        waited = int(SCHEDULER.read_text(encoding="ascii").split()[1])
    except (FileNotFoundError, IndexError):
        waited = 0  # no Linux, or one that does not count
    return time.monotonic() - waited / 1e9


def held() -> dict[str, int]:
    """What a process can be seen to hold, without the threads of the event loop's own pool."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return {"tasks": len(asyncio.all_tasks()), "threads": len(threads), "child processes": child_processes()}


def child_processes() -> int:
    """How many processes this one has started that have not been waited for; 0 where the system does not tell."""
    count = 0
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            count += len(path.read_text(encoding="utf-8").split())
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended since; what it has started is then another's
    return count


async def check_released(before: Mapping[str, int], what: str) -> None:
    """Wait until no more is held than before.

    Raises:
        Broken: If that does not come.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLED_SECONDS
    while grown := [kind for kind, count in held().items() if count > before[kind]]:
        if loop.time() > deadline:
            raise Broken(f"{what} leaves {', '.join(grown)} behind")
        await asyncio.sleep(0.02)

"""Deadlines of equal length for thousands of waits, with one timer of the event loop for all of them."""

from __future__ import annotations

import asyncio
from types import TracebackType


class SharedTimer:
    """Deadlines that all have the same length, so that they end in the order in which they began.

    A timer each would cost more than everything else about a short wait, and cancelled ones stay in the event loop.

    Args:
        seconds: From the beginning of a wait to its end.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Deadline, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # in which the timer runs, if it does

    def deadline(self) -> Deadline:
        """A context whose body has ``seconds`` from its beginning; then it ends with ``TimeoutError``."""
        return Deadline(self)

    def _begin(self, deadline: Deadline) -> None:
        loop = asyncio.get_running_loop()
        deadline.at = loop.time() + self.seconds
        self._running[deadline] = None
        if self._loop is not loop:
            self._loop = loop
            loop.call_at(deadline.at, self._sweep)

    def _end(self, deadline: Deadline) -> None:
        self._running.pop(deadline, None)  # the timer goes on: most likely somebody else waits soon

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._running:
            deadline = next(iter(self._running))
            if deadline.at > now:
                loop.call_at(deadline.at, self._sweep)
                return
            del self._running[deadline]
            deadline.expire()
        self._loop = None


class Deadline:
    """One of a `SharedTimer`'s, for the task that enters it.

    Attributes:
        expired: Whether the time was up; `TimeoutError` may come from the body as well.
    """

    __slots__ = ("_cancelling", "_task", "_timer", "at", "expired")

    def __init__(self, timer: SharedTimer) -> None:
        self._timer = timer
        self.at = 0.0
        self.expired = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be stopped at a deadline")
        self._task, self._cancelling = task, task.cancelling()
        self._timer._begin(self)
        return self

    def expire(self) -> None:
        """The time is up: stop the task where it waits."""
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer._end(self)
        # Whoever else wants the task to stop gets what it wants.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError(f"not done within {self._timer.seconds:g} s") from error

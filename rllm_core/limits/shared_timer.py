"""Timeouts of equal length for thousands of waits, with one event-loop timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from types import CoroutineType, TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class SharedTimer:
    """Timeouts of the same length, which therefore expire in the order they started.

    Separate timers would be the largest cost of a short wait, and cancelled timers stay in the event loop.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: dict[Deadline, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the running timer, if any

    def deadline(self) -> Deadline:
        """Returns a context that raises ``TimeoutError`` after ``seconds``."""
        return Deadline(self)

    def _begin(self, deadline: Deadline) -> None:
        loop = asyncio.get_running_loop()
        deadline.at = loop.time() + self.seconds
        self._running[deadline] = None
        if self._loop is not loop:
            self._loop = loop
            loop.call_at(deadline.at, self._sweep)

    def _end(self, deadline: Deadline) -> None:
        self._running.pop(deadline, None)  # the timer keeps running: another wait is likely soon

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
    """A timeout of a `SharedTimer`, for the task that enters it.

    Attributes:
        expired: Whether the timeout expired; the body may raise `TimeoutError` as well.
    """

    __slots__ = ("_cancelling", "_task", "_timer", "at", "begun", "expired")

    def __init__(self, timer: SharedTimer) -> None:
        self._timer = timer
        self.at = 0.0
        self.begun = False
        self.expired = False

    async def limit(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Awaits in this context, which is entered only if ``awaitable`` does not finish at once."""
        if type(awaitable) is CoroutineType:
            try:
                first = awaitable.send(None)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
            awaitable = _Begun(awaitable, first)
        with self:
            return await awaitable

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be stopped at a deadline")
        self._task, self._cancelling, self.begun = task, task.cancelling(), True
        self._timer._begin(self)
        return self

    def expire(self) -> None:
        """Cancels the task."""
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer._end(self)
        # Convert only our own cancellation to TimeoutError; other cancellations propagate.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError(f"not done within {self._timer.seconds:g} s") from error


class _Begun:
    """The rest of a coroutine that has already run until it waited for ``first``.

    Attributes:
        cr_await: The coroutine, under the name that `rllm_core.limits.timeouts.waiting_at` looks for.
    """

    __slots__ = ("_first", "_is_new", "cr_await")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], first: Any) -> None:
        self.cr_await, self._first, self._is_new = coroutine, first, True

    def __await__(self) -> _Begun:
        return self

    def __iter__(self) -> _Begun:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Resumes the coroutine; the first call passes on the future that the coroutine already waits for."""
        if self._is_new:
            self._is_new = False
            first, self._first = self._first, None
            return first
        return self.cr_await.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error at the point where the coroutine waits."""
        return self.cr_await.throw(*error)

    def close(self) -> None:
        """Ends the coroutine."""
        self.cr_await.close()

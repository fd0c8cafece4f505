"""Calls third-party code that may raise anything, hang or fall behind, without letting it stop the run."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

_Call = Callable[[], object]
_Done = Callable[[object, BaseException | None, float], None]  # result, error, and seconds that the call took
_abandoned: set[asyncio.Task[object]] = set()  # asyncio keeps no strong references to tasks


class DeadlineExceeded(Exception):
    """Third-party code did not return in time."""


class CallThread(threading.Thread):
    """Thread that makes calls one after another, in a copy of its creator's context.

    A daemon: a hanging call must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._calls: queue.SimpleQueue[tuple[_Call, _Done] | None] = queue.SimpleQueue()
        self._began: float | None = None
        self._drops_calls = False
        self._context = contextvars.copy_context()

    @property
    def waiting(self) -> int:
        """Number of calls in the queue."""
        return self._calls.qsize()

    @property
    def seconds_in_call(self) -> float:
        """Seconds that the current call has taken so far."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def put(self, call: _Call, done: _Done) -> None:
        """Queues a call; ``done`` gets its result, its error and the seconds it took, in this thread."""
        self._calls.put((call, done))

    async def call(self, call: _Call, deadline_seconds: float) -> Any:
        """Makes a call and returns its result.

        Raises:
            DeadlineExceeded: If it did not return in time; if it still runs, it continues, and its result is ignored.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[object, BaseException | None, float]] = loop.create_future()

        def settle(*ended: Any) -> None:
            if not outcome.done():
                outcome.set_result(ended)

        def done(*ended: Any) -> None:
            try:
                loop.call_soon_threadsafe(settle, *ended)
            except RuntimeError:
                pass  # the run is over and its loop closed, so nothing waits for this result

        self.put(call, done)
        await asyncio.wait({outcome}, timeout=deadline_seconds)
        if not outcome.done():
            raise DeadlineExceeded
        result, error, seconds = outcome.result()
        if seconds > deadline_seconds:  # a call that never let go of the interpreter held the timeout up as well
            raise DeadlineExceeded
        return _result(result, error)

    def close(self, *, drops_calls: bool = False) -> None:
        """Ends the thread after the queued calls, or after the current one if ``drops_calls``."""
        self._drops_calls = self._drops_calls or drops_calls
        self._calls.put(None)

    def run(self) -> None:
        """Makes the calls until the queue is closed."""
        self._context.run(self._make_calls)

    def _make_calls(self) -> None:
        while (queued := self._calls.get()) is not None and not self._drops_calls:
            call, done = queued
            result, error = None, None
            self._began = began = time.monotonic()
            try:
                result = call()
            except BaseException as raised:  # a SystemExit would vanish in a thread; a real Ctrl-C is in the main one
                error = raised
            self._began = None
            done(result, error, time.monotonic() - began)


async def within(deadline_seconds: float, awaitable: Awaitable[object]) -> object:
    """Awaits third-party code.

    Raises:
        DeadlineExceeded: If it did not end in time; it is cancelled, but not waited for, as it may ignore that.
    """
    task = asyncio.ensure_future(_contained(awaitable))
    try:
        await asyncio.wait({task}, timeout=max(0.0, deadline_seconds))
    finally:
        if not task.done():
            task.cancel()
            _abandoned.add(task)
            task.add_done_callback(_abandoned.discard)
    if not task.done():
        raise DeadlineExceeded
    return _result(*task.result())


async def _contained(awaitable: Awaitable[object]) -> tuple[object, BaseException | None]:
    """Returns result and error. A SystemExit that escaped a task would stop the event loop."""
    try:
        return await awaitable, None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def _result(result: object, error: BaseException | None) -> object:
    """Returns the result or raises the error, as an ``Exception``, which callers can tell from their own errors."""
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"raised {type(error).__name__}: {error}") from error

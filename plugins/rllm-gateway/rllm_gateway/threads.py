"""Calls a plain function in a thread, so that the message of a timeout can say at which line the function is."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any


class ThreadCall(Generator[Any, Any, Any]):
    """A call in a thread; await it for the result.

    Like a coroutine, it says in ``cr_await`` where it waits. A future, as the pool returns, does not know.

    Args:
        threads: Pool for the call.
        function: Function to call.
        arguments: Arguments by name.
    """

    def __init__(self, threads: Executor, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._thread = 0
        call = contextvars.copy_context().run
        future = asyncio.get_running_loop().run_in_executor(threads, call, self._returned, function, arguments)
        self._result: Any = future.__await__()

    @property
    def cr_await(self) -> Any:
        """The frames of the call, as a chain of coroutines would have them: each awaits the next inner one."""
        level, frame = None, sys._current_frames().get(self._thread)
        while frame is not None:
            level, frame = SimpleNamespace(cr_frame=frame, cr_await=level), frame.f_back
        return level

    def __await__(self) -> ThreadCall:
        return self

    def send(self, value: Any) -> Any:
        """Continues the wait for the result."""
        return self._result.send(value)

    def throw(self, *error: Any) -> Any:
        """Ends the wait with an error."""
        return self._result.throw(*error)

    def _returned(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        self._thread = threading.get_ident()
        try:
            return function(**arguments)
        except StopIteration as stop:  # no future can carry it: the rollout would wait until its timeout
            raise RuntimeError("the function raised StopIteration").with_traceback(stop.__traceback__) from stop
        finally:
            self._thread = 0  # the thread serves other rollouts then

"""Event loop with a virtual clock: it stops while anything can run, and jumps to the next timer when nothing can.

Events keep their real order, including timers, and hours of waiting take no time. Work in executor threads
(`asyncio.to_thread`) is real; the clock stops until it is done.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar
from unittest import mock

ResultT = TypeVar("ResultT")


class _JumpingSelector(selectors.BaseSelector):
    """Waits for file descriptors as usual, but advances the virtual clock instead of waiting for time to pass."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0
        self.work_in_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (timeout > 0 and self.work_in_threads):
            return self._real.select(None)  # a finished thread writes to the loop's own pipe
        ready = self._real.select(0)
        if not ready:
            self.now += max(timeout, 0.0)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop with the module's virtual clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the virtual seconds since the loop was created."""
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., ResultT], *args: Any
    ) -> asyncio.Future[ResultT]:
        """Runs a function in a thread; stops the clock until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._jumping.work_in_threads += 1
        future.add_done_callback(self._thread_is_done)
        return future

    def _thread_is_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.work_in_threads -= 1


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Does the same as `asyncio.run`, on a virtual clock that `time.monotonic` also shows."""
    loop = VirtualClockLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, mock.patch.object(time, "monotonic", loop.time):
        return runner.run(main)

"""An event loop in a thread of its own, for callers whose own thread runs one already, such as a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

ResultT = TypeVar("ResultT")
Arguments = TypeVarTuple("Arguments")

STOPPING = (signal.SIGINT, signal.SIGTERM)


class LoopOfThread(asyncio.SelectorEventLoop):
    """Event loop of another thread than the main one, which calls its handlers of SIGINT and SIGTERM for it."""

    def __init__(self) -> None:
        super().__init__()
        self._relayed: dict[int, Callable[[], object]] = {}
        self._main: asyncio.Future[Any] | None = None

    def add_signal_handler(self, sig: int, callback: Callable[[*Arguments], object], *args: *Arguments) -> None:
        """Adds a handler; Python lets only the main thread have real ones."""
        self._relayed[sig] = functools.partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        """Removes a handler, and returns whether there was one."""
        return self._relayed.pop(sig, None) is not None

    def run_until_complete(self, future: Any) -> Any:
        """Runs as usual; `interrupt` cancels it."""
        self._main = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._main)

    def relay(self, number: int) -> bool:
        """Calls the handler of a signal in the thread of the loop; returns whether there is one."""
        handler = self._relayed.get(number)
        if handler is not None:
            self.call_soon_threadsafe(handler)
        return handler is not None

    def interrupt(self) -> None:
        """Cancels what the loop runs, or what it runs first if it has not started yet."""
        main = self._main

        def cancel() -> None:
            if (running := main or self._main) is not None:
                running.cancel()

        if not self.is_closed():
            self.call_soon_threadsafe(cancel)


def in_thread(work: Callable[[asyncio.Runner], ResultT]) -> ResultT:
    """Calls ``work`` in a new thread, with a runner for its event loop, and waits for its result.

    Raises:
        KeyboardInterrupt: After SIGINT, unless the loop has a handler for it. The thread has then been stopped; after
            a second SIGINT, it may still run.
    """
    loop, result = LoopOfThread(), Future[ResultT]()

    def run() -> None:
        try:
            result.set_result(work(asyncio.Runner(loop_factory=lambda: loop)))
        except BaseException as error:
            result.set_exception(error)

    # In the context of the caller, by which a notebook finds the cell that output belongs to.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="rllm-core run", daemon=True)
    with _relaying(loop) as interrupted:
        thread.start()
        thread.join()
    if interrupted:
        raise KeyboardInterrupt
    return result.result()


@contextlib.contextmanager
def _relaying(loop: LoopOfThread) -> Iterator[list[int]]:
    """Relays signals of the process to the loop; without a handler there, a first SIGINT cancels what the loop runs.

    Yields:
        List that gets that SIGINT. It is not raised in the caller at once: an interrupted join of Python 3.11 takes a
        running thread for one that has ended.
    """
    interrupted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING}

    def receive(number: int, frame: FrameType | None) -> None:
        if loop.relay(number):
            return
        if number == signal.SIGINT:  # the loop of the caller would only cancel its task, after this call
            if interrupted:
                raise KeyboardInterrupt
            interrupted.append(number)
            loop.interrupt()
            return
        signal.signal(number, before[number])
        signal.raise_signal(number)

    for number in STOPPING:
        signal.signal(number, receive)
    try:
        yield interrupted
    finally:
        for number in STOPPING:
            signal.signal(number, before[number])

"""Event loop in a separate thread, for callers whose own thread already runs one, such as a notebook."""

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


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that stop a run: SIGINT, SIGTERM, and SIGHUP unless the process ignores it (``nohup``)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


class LoopOfThread(asyncio.SelectorEventLoop):
    """Event loop outside the main thread; the main thread relays `stopping_signals` to the loop's handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._relayed: dict[int, Callable[[], object]] = {}
        self._main: asyncio.Future[Any] | None = None

    def add_signal_handler(self, sig: int, callback: Callable[[*Arguments], object], *args: *Arguments) -> None:
        """Adds a handler for relayed signals; Python allows real signal handlers only in the main thread."""
        self._relayed[sig] = functools.partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        """Removes a handler, and returns whether there was one."""
        return self._relayed.pop(sig, None) is not None

    def run_until_complete(self, future: Any) -> Any:
        """Runs ``future`` as usual; `interrupt` cancels it."""
        self._main = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._main)

    def relay(self, number: int) -> bool:
        """Calls the handler of a signal in the loop's thread; returns False if there is none."""
        handler = self._relayed.get(number)
        if handler is not None:
            self.call_soon_threadsafe(handler)
        return handler is not None

    def interrupt(self) -> None:
        """Cancels the future that the loop runs, or the first one if the loop has not started yet."""
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
            a second SIGINT, it may still be running.
    """
    loop, result = LoopOfThread(), Future[ResultT]()

    def run() -> None:
        try:
            result.set_result(work(asyncio.Runner(loop_factory=lambda: loop)))
        except BaseException as error:
            result.set_exception(error)

    # In the caller's context, from which a notebook knows which cell the output belongs to.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="rllm-core run", daemon=True)
    with _relaying(loop) as interrupted:
        thread.start()
        thread.join()
    if interrupted:
        raise KeyboardInterrupt
    return result.result()


@contextlib.contextmanager
def _relaying(loop: LoopOfThread) -> Iterator[list[int]]:
    """Relays signals of the process to the loop; if it has no handler, the first SIGINT cancels its current future.

    Yields:
        List that receives that SIGINT. It is not raised in the caller at once: in Python 3.11, a join that is
        interrupted treats a running thread as ended.
    """
    interrupted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in stopping_signals()}

    def receive(number: int, frame: FrameType | None) -> None:
        if loop.relay(number):
            return
        if number == signal.SIGINT:  # the caller's own loop would only cancel its task, and only after this call
            if interrupted:
                raise KeyboardInterrupt
            interrupted.append(number)
            loop.interrupt()
            return
        signal.signal(number, before[number])
        signal.raise_signal(number)

    for number in before:
        signal.signal(number, receive)
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

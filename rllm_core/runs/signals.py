"""Signals of the process: the first SIGINT, SIGTERM or SIGHUP saves a checkpoint and stops the run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable
from types import FrameType
from typing import TypeVar

from rllm_core.limits.guard import leave
from rllm_core.limits.loop_thread import stopping_signals
from rllm_core.run_folder.progress import Progress, for_terminal
from rllm_core.training.stopping import Interrupted
from rllm_core.training.trainer import Trainer

ResultT = TypeVar("ResultT")
# Programs that pass a signal on, such as `timeout` and shells, send it to the process and to its group.
REPEATED_SECONDS = 0.5


class Signals:
    """Signal handlers: the first signal saves and stops the run, a second one exits immediately.

    Signals reach only the main thread of a process, and event loops that it relays them to
    (`rllm_core.limits.loop_thread`). In other threads, the handlers do nothing.

    Attributes:
        trainer: Trainer to interrupt; before it is set, a signal cancels the launch.
        interrupted: Error that the first signal raises.
        is_closing: Whether the run is over and shutting down.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.trainer: Trainer | None = None
        self.interrupted: Interrupted | None = None
        self.is_closing = False
        self._began = 0.0

    def __enter__(self) -> Signals:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._numbers = stopping_signals()
        with contextlib.suppress(RuntimeError):  # in another thread than the main one
            for number in self._numbers:
                if threading.current_thread() is not threading.main_thread():
                    self._loop.add_signal_handler(number, self._relayed, number)
                    continue
                self._loop.add_signal_handler(number, self._stop, number)
                signal.signal(number, self._received)  # besides: a blocked loop does not call its handler
                signal.siginterrupt(number, False)  # as the loop does
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            self._loop.remove_signal_handler(number)

    def close(self) -> None:
        """Records that the run is over."""
        self.trainer, self.is_closing = None, True

    def _received(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if not self._began:
            self._began = now
            threading.Thread(target=self._note_if_blocked, args=(number,), daemon=True).start()
        if now - self._began > REPEATED_SECONDS:
            leave(128 + number)

    def _note_if_blocked(self, number: int) -> None:
        time.sleep(REPEATED_SECONDS)
        if self.interrupted is None:
            name = signal.Signals(number).name
            self.progress.note(f"{name} received: waiting for a call to end. Send it again to exit immediately")

    def _relayed(self, number: signal.Signals) -> None:
        self._received(number)
        self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.interrupted is not None:
            return
        self.interrupted = Interrupted(int(number), number.name)
        if self.trainer is not None:
            self.progress.note(f"{number.name} received: saving a checkpoint. Send it again to exit immediately")
            self.trainer.interrupt(self.interrupted)
            return
        # Shutting down waits for calls in progress, such as the loading of a model.
        self.progress.note(f"{number.name} received: shutting down. Send it again to exit immediately")
        if self._task is not None and not self.is_closing:
            self._task.cancel()


async def until_signalled(main: Awaitable[ResultT]) -> ResultT:
    """Awaits ``main``, which the first signal cancels; a second one exits immediately.

    Raises:
        Interrupted: After a signal.
    """
    with Signals(for_terminal()) as signals:
        try:
            return await main
        except asyncio.CancelledError as error:
            if signals.interrupted is None:
                raise
            raise signals.interrupted from error

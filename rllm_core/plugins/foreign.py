"""Protection of this process's streams and time from third-party code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from rllm_core.errors import Overran

STANDARD_STREAMS = (1, 2)


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Redirects stdout to stderr, and restores both afterwards, even if they were closed.

    This covers ``sys.stdout`` and the file descriptors, which child processes and C libraries write to.
    """
    kept = {}
    for descriptor in STANDARD_STREAMS:
        with contextlib.suppress(OSError):  # a process may be started without this stream
            kept[descriptor] = os.dup(descriptor)
    if len(kept) == len(STANDARD_STREAMS):
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


@contextlib.contextmanager
def ended_within(seconds: float) -> Iterator[None]:
    """Interrupts the enclosed code after ``seconds``, repeatedly until it ends.

    Only the main thread can be interrupted. In other threads, or if the alarm is already in use, this does nothing.

    Raises:
        Overran: Inside the code that took too long.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Overran(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

"""Protection from third-party code and text: of the streams, the time and the terminal of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from rllm_core.errors import PluginError

MAX_TEXT_CHARACTERS = 1_000
STANDARD_STREAMS = (1, 2)


def printable(text: str) -> str:
    """Returns ``text`` as one line of limited length, without terminal control characters."""
    cut = text[:MAX_TEXT_CHARACTERS]
    line = " ".join("".join(character if character.isprintable() else " " for character in cut).split())
    return f"{line} ... ({len(text):,} characters)" if len(text) > len(cut) else line


def printable_lines(text: str) -> str:
    """Returns ``text``, which may have several lines, without terminal control characters."""
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


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


class Overran(BaseException):
    """Third-party code did not end in time. A BaseException, so that its own ``except Exception`` cannot catch it."""


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


def one_line(error: BaseException) -> str:
    """Returns an exception as one line of text."""
    try:
        text = printable(_text(error))
    except Exception as mute:  # __str__ may be third-party code
        text = f"its message is not available: {type(mute).__name__}"
    if isinstance(error, PluginError | Overran):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    from pydantic import ValidationError  # imported here: only errors need it, and listing commands should stay fast

    if isinstance(error, BaseExceptionGroup):
        more = f" (and {len(error.exceptions) - 1} more)" if len(error.exceptions) > 1 else ""
        return f"{error.message}: {one_line(error.exceptions[0])}{more}"
    if isinstance(error, ValidationError):
        # Pydantic's own text has one line per field and ends in a URL.
        problems = (
            (".".join([error.title, *map(str, problem["loc"])]), problem["msg"].removeprefix("Value error, "))
            for problem in error.errors()
        )
        return "; ".join(f"{field}: {message}" for field, message in problems)
    return str(error)

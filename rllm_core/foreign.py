"""Code and text of others: what they may do to the streams, the time and the terminal of this process."""

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
    """``text`` in one line of bounded length, without anything that would control a terminal."""
    cut = text[:MAX_TEXT_CHARACTERS]
    line = " ".join("".join(character if character.isprintable() else " " for character in cut).split())
    return f"{line} ... ({len(text):,} characters)" if len(text) > len(cut) else line


def printable_lines(text: str) -> str:
    """``text`` of several lines, without anything that would control a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """What is written to stdout in here goes to stderr, and both are open again afterwards, whatever was closed.

    That holds for file descriptors as it does for ``sys.stdout``: a child process and a C library write to the former.
    """
    kept = {}
    for descriptor in STANDARD_STREAMS:
        with contextlib.suppress(OSError):  # a process may be started without it
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
    """Foreign code did not end in time; no ``except Exception`` of its own holds this back."""


@contextlib.contextmanager
def ended_within(seconds: float) -> Iterator[None]:
    """Interrupt what runs in here after ``seconds``, again and again until it ends.

    Only the main thread can be interrupted; elsewhere, and where somebody else uses the alarm, this does nothing.

    Raises:
        Overran: Inside of the code that took too long.
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
    """An exception as one line of text."""
    try:
        text = printable(_text(error))
    except Exception as mute:  # it is foreign code that says what is wrong
        text = f"its message is not available: {type(mute).__name__}"
    if isinstance(error, PluginError | Overran):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    from pydantic import ValidationError  # only errors need it, and listing commands does without

    if isinstance(error, BaseExceptionGroup):
        more = f" (and {len(error.exceptions) - 1} more)" if len(error.exceptions) > 1 else ""
        return f"{error.message}: {one_line(error.exceptions[0])}{more}"
    if isinstance(error, ValidationError):
        # Pydantic's own text ends in the address of a web page and gives every field a line of its own.
        problems = (
            (".".join([error.title, *map(str, problem["loc"])]), problem["msg"].removeprefix("Value error, "))
            for problem in error.errors()
        )
        return "; ".join(f"{field}: {message}" for field, message in problems)
    return str(error)

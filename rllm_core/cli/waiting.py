"""Shows in a terminal what a command waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENT_SECONDS = 1.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows what takes longer than a second, until it is done; nothing if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    timer = threading.Timer(SILENT_SECONDS, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()

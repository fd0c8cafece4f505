"""Shows in a terminal what a command is waiting for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENT_SECONDS = 1.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows ``what`` from one second on until the context ends; shows nothing if standard error is not a terminal."""
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

"""Kills a worker and everything in its session when its actor is gone. Runs as a script.

Its standard input is the worker's process id. End of input means that the actor has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Waits for the end of the actor."""
    if os.fork():
        return  # Ray ends an actor's children before the actor, so this must not be one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker = sys.stdin.readline()
    sys.stdin.read()
    with contextlib.suppress(ValueError, ProcessLookupError):
        os.killpg(int(worker), signal.SIGKILL)


if __name__ == "__main__":
    main()

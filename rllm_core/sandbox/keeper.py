"""Ends what a process has started when that process is gone, however it ended."""

from __future__ import annotations

import subprocess
import sys

from rllm_core.sandbox import keeper_process


class ProcessKeeper:
    """A process that only waits for the end of this one, and then kills what this one has left behind.

    A process that is killed cannot end what it has started. Start processes with ``start_new_session=True``: everything
    in their sessions ends with them.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def started(self, pid: int) -> None:
        """Tells it that a process has been started."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """Tells it that a process has ended, with all that it had started."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Ends it. It kills what is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.write(line.encode())

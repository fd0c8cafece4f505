"""Ends the processes that a process has started once that process is gone, however it ended."""

from __future__ import annotations

import secrets
import subprocess
import sys

from rllm_core.sandbox import keeper_process


class ProcessKeeper:
    """A process that waits for the end of this process, and then kills the processes that this one has left behind.

    A process that is killed cannot end the processes that it has started. Start them with ``start_new_session=True``:
    everything in their sessions ends with them. A process may be killed before it has told what it has started, so add
    ``environment`` to theirs, by which they are found where there is ``/proc``.

    Args:
        folder: Folder to remove in the end, with the files that a killed process leaves behind; "" for none.

    Attributes:
        environment: Environment variable that no other process has.
    """

    def __init__(self, folder: str = "") -> None:
        mark = secrets.token_hex(16)
        self.environment = {"RLLM_KEEPER": mark}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper_process.__file__, folder, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def started(self, pid: int) -> None:
        """Tells the keeper that a process has been started."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """Tells the keeper that a process has ended, with all processes that it had started."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Ends the keeper, which kills the remaining processes and removes its folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.write(line.encode())

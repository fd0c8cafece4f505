"""Script that kills processes when their starter is gone, however it ended; see `rllm_core.sandbox.keeper`.

Its input names the processes: ``+PID`` when one has started, ``-PID`` when one has ended. When the input ends, or the
process that started the script is gone, the script kills the remaining processes, with everything in their sessions,
and those with the mark that its second argument names. Then it removes the folder of the first; "" names none.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from pathlib import Path

POLL_SECONDS = 0.5


def main() -> None:
    """Waits for the end of the process that started this script, then kills the remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the other process
    parent = os.getppid()
    left: set[int] = set()
    line = b""
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, line = (line + data).split(b"\n")
            for entry in lines:
                (left.add if entry[:1] == b"+" else left.discard)(int(entry[1:]))
        elif os.getppid() != parent:
            break
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    folder, mark = sys.argv[1:]
    kill_marked(mark.encode())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def kill_marked(mark: bytes) -> None:
    """Kills all processes with a mark in their environment, and those that they start meanwhile. Needs ``/proc``."""
    killed: set[int] = set()
    before = -1
    while len(killed) > before:
        before = len(killed)
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    killed.add(int(file.parent.name))


if __name__ == "__main__":
    main()

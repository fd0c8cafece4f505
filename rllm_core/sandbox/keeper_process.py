"""Script that kills processes when their starter is gone, however it ended; see `rllm_core.sandbox.keeper`.

Its input names the processes: ``+PID`` when one has started, ``-PID`` when one has ended. When the input ends, or the
process that started the script is gone, the script kills the remaining processes, with everything in their sessions.
Then it removes the folder that its argument names; "" names none.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys

POLL_SECONDS = 0.5


def main() -> None:
    """Waits for the end of the process that started this script, then kills the remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the other process
    parent = os.getppid()
    left: set[int] = set()
    line = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], POLL_SECONDS)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, line = (line + data).split(b"\n")
        for entry in lines:
            (left.add if entry[:1] == b"+" else left.discard)(int(entry[1:]))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if folder := sys.argv[1]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

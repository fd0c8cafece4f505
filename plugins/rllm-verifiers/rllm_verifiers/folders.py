"""The working folders that verifiers makes for rollouts, and leaves behind if their worker is killed."""

from __future__ import annotations

import os
import shutil
import socket
from hashlib import blake2b
from typing import Any

# Machines and containers may share a home folder, and have processes with the same id.
MACHINE = f"rllm-{blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()}"


def own(trace: Any) -> None:
    """Adds this process to a new trace's id, from which verifiers names the folder."""
    trace.id = f"{MACHINE}-{os.getpid()}-{trace.id}"


def sweep() -> None:
    """Removes the folders of processes that have ended."""
    from verifiers.v1.utils.paths import CACHE_DIR

    for folder in (CACHE_DIR / "runtimes" / "subprocess").glob(f"{MACHINE}-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True

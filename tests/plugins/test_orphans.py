"""Tests that child processes that inspect plugins end with their command, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def descendants(pid: int) -> set[int]:
    """Returns the ids of all processes below a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has just ended
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def seconds_used(pid: int) -> float:
    """Returns the processor time that a process has used in user mode, 0 if it has ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return ticks / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Returns whether a process has not ended; whether somebody has asked for its exit code does not matter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plugins", "--load"), ("plugins", "check", "endless")], ids=" ".join)
def test_nothing_spins_on_when_the_command_is_killed(
    installed: Callable[..., list[str]], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(installed("rllm-endless"))}
    command = subprocess.Popen(
        [sys.executable, "-P", "-m", "rllm_core", *arguments],
        env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    children: set[int] = set()
    try:

        def is_stuck() -> bool:
            """Returns whether a child has used more time than any import that ends."""
            children.update(descendants(command.pid))
            return max(map(seconds_used, children), default=0) > 2.0

        wait_until(is_stuck)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    wait_until(lambda: not any(map(is_running, children)))

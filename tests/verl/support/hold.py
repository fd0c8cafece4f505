"""Holds a run at a step, so that what a test does to it happens there and not after its end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

LONG_SECONDS = 600.0
MustEnd = Callable[[Sequence[psutil.Process]], None]
HELD = str(Path(__file__).with_name("held.py"))


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def steps_done(folder: Path) -> int:
    """Number of optimizer steps so far."""
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.is_file() else 0


class Hold:
    """Lets a run take only as many steps as the test allows, so that none ends before its loss is noticed."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._folder, self._run = folder, run
        folder.mkdir()
        self.allow(1)
        self.settings = {"held.folder": str(folder), "held.metrics": str(run / "metrics.jsonl")}

    def allow(self, steps: int) -> None:
        """Lets rollouts go on until the run has taken so many steps."""
        (self._folder / "next").write_text(str(steps))
        (self._folder / "next").replace(self._folder / "allowed")

    def wait_for(self, steps: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """Waits until the run, which lives in ``process``, has taken so many steps and two workers hold rollouts."""

        def is_held() -> bool:
            assert process is None or process.poll() is None, "the run has ended"
            return steps_done(self._run) >= steps and len(list(self._folder.glob(f"held-{steps}-*"))) >= 2

        eventually(is_held)

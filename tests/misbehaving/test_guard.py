"""Stacks that the guard of the event loop asks for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from rllm_core.limits import guard_process
from rllm_core.limits.guard import Guard

KEEPS_DUMPS = """\
import os, sys
while data := os.read(int(sys.argv[2]), 1 << 16):
    with open({path!r}, "ab") as file:
        file.write(data)
"""


def test_a_signal_shows_the_main_thread_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run on while the signal is handled: to walk their stacks crashed runs that were interrupted."""
    kept = tmp_path / "dumps"
    (tmp_path / "keeps_dumps.py").write_text(KEEPS_DUMPS.format(path=str(kept)))
    monkeypatch.setattr(guard_process, "__file__", str(tmp_path / "keeps_dumps.py"))
    ended = threading.Event()

    def another_thread() -> None:
        ended.wait()

    async def interrupted() -> None:
        loop, got = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, got.set)  # as a run does, whose guard begins later
        with Guard(60, "go on"):
            os.kill(os.getpid(), signal.SIGTERM)
            await got.wait()
        loop.remove_signal_handler(signal.SIGTERM)

    thread = threading.Thread(target=another_thread)
    thread.start()
    try:
        asyncio.run(interrupted())
    finally:
        ended.set()
        thread.join()
    assert "in interrupted" in kept.read_text()
    assert "another_thread" not in kept.read_text()

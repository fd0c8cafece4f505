"""The guard of the event loop: stacks that it asks for, and what it takes for silence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rllm_core.limits import guard_process
from rllm_core.limits.guard import Guard
from rllm_core.limits.guard_process import POLL_SECONDS, Watch

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


SPINS = "while True: pass"
SLEEPS = "import time; time.sleep(600)"
WATCHED_POLLS = 5


@contextmanager
def process(code: str, *, niceness: int = 0) -> Iterator[int]:
    """Yields the pid of a Python process that may use one processor, the same for all."""
    begin = (
        f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); os.nice({niceness}); print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", f"{begin}\n{code}"], stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            yield started.pid
        finally:
            started.kill()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_state(pid: int, state: bytes) -> None:
    """Waits until a process sleeps (``S``) or is suspended (``T``), also on a busy machine."""
    while Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != state:
        time.sleep(0.01)


def watched(pid: int) -> tuple[float, float, float]:
    """Watches a process that sends no heartbeat; returns the silence, its processor time and the time that passed."""
    beats, dumps = os.pipe(), os.pipe()
    watch = Watch(beats[0], dumps[0], pid)
    began, used = time.monotonic(), cpu_seconds(pid)
    for _ in range(WATCHED_POLLS):
        watch.wait()
    found = watch.silent_seconds, cpu_seconds(pid) - used, time.monotonic() - began
    for descriptor in (*beats, *dumps):
        os.close(descriptor)
    return found


@pytest.mark.slow
def test_a_loop_that_sleeps_is_silent_all_the_time() -> None:
    with process(SLEEPS) as pid:
        wait_for_state(pid, b"S")
        silent, _, _ = watched(pid)
    assert silent > 0.9 * WATCHED_POLLS * POLL_SECONDS


@pytest.mark.slow
def test_a_loop_that_computes_is_silent_for_its_processor_time() -> None:
    with process(SPINS) as pid:
        silent, used, _ = watched(pid)
    assert used / 2 - 0.1 < silent < used + 0.1, "the end of the time used is later, on a busy machine"


@pytest.mark.slow
def test_a_process_without_a_processor_is_not_silent() -> None:
    """Others take nearly all time of its processor: it gets on, but slowly."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(process(SPINS))
        silent, used, passed = watched(stack.enter_context(process(SPINS, niceness=19)))
    assert used < 0.5 * passed, "the others did not keep it from its processor"
    assert used / 2 - 0.1 < silent < used + 0.1, "the end of the time used is later, on a busy machine"


@pytest.mark.slow
def test_a_suspended_process_is_not_silent() -> None:
    with process(SLEEPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, b"T")
        assert watched(pid)[0] == 0.0

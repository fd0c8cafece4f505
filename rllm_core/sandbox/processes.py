"""Child processes with deadlines: start, write, read and end. Works in any thread."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from rllm_core.sandbox.results import Limits

WORKER = str(Path(__file__).with_name("in_child.py"))

# Environment variables passed to a child: enough to run, without anything that could be a secret.
PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")

_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.05


class Overrun(Exception):
    """The deadline has passed."""


def start(
    kind: Literal["function", "program"],
    target: str,
    limits: Limits,
    *,
    folder: str | None = None,
    keep_errors: bool = True,
    variables: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Runs `rllm_core.sandbox.in_child` in its own session, and in ``folder`` if given, which is also its home.

    ``variables`` are names of environment variables that the process gets in addition to `PASSED_VARIABLES`.
    """
    arguments = [kind, target, str(limits.memory_bytes), str(limits.output_bytes), str(limits.wall_seconds)]
    return subprocess.Popen(
        [sys.executable, "-P", WORKER, *arguments],  # -P: do not import from the working directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keep_errors else subprocess.DEVNULL,
        cwd=folder,
        env=environment(os.environ, variables) | ({"HOME": folder} if folder else {}),
        start_new_session=True,
        bufsize=0,
    )


def environment(variables: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment variables of a child: one thread per library, since many children run at once.

    All children have the same hash seed, so a function that iterates over a set returns the same in each of them.
    """
    passed = {name: variables[name] for name in (*PASSED_VARIABLES, *more) if name in variables}
    return {**passed, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child and all of its descendants that stayed in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # its process group is gone


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a child, waits for it, and closes its pipes."""
    kill(process)
    process.wait()
    for pipe in _pipes(process):
        pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> list[IO[bytes]]:
    return [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]


class Exchange:
    """Writes to a child and reads from it until ``deadline``, a value of ``time.monotonic``."""

    def __init__(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        self._process = process
        self._deadline = deadline
        for opened in _pipes(process):
            os.set_blocking(opened.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self.output, self.errors = bytearray(), bytearray()
        for pipe, received in ((process.stdout, self.output), (process.stderr, self.errors)):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, received)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def send(self, data: bytes, *, then_close: bool = False) -> None:
        """Queues ``data``, which `step` writes."""
        stdin = self._process.stdin
        assert stdin is not None
        self._outgoing, self._then_close = memoryview(data), then_close
        if data:
            self._selector.register(stdin, selectors.EVENT_WRITE)
        elif then_close:
            stdin.close()

    def step(self) -> bool:
        """Waits for the next chunk; returns whether more output can follow.

        Raises:
            Overrun: At the deadline.
        """
        left = self._deadline - time.monotonic()
        ready = self._selector.select(max(0.0, min(left, _POLL_SECONDS)))
        if not ready:
            if left <= _POLL_SECONDS:
                raise Overrun
            if self._process.poll() is None:
                return True
            # The child may have written and ended since then. Its own children may keep the pipes open.
            ready = self._selector.select(0)
            if not ready:
                return False
        for key, _ in ready:
            if key.data is None:
                self._write()
            elif chunk := os.read(key.fd, _CHUNK_BYTES):
                key.data.extend(chunk)
            else:
                self._selector.unregister(key.fileobj)
        return any(key.data is not None for key in self._selector.get_map().values())

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            self._outgoing = self._outgoing[os.write(stdin.fileno(), self._outgoing[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._outgoing = self._outgoing[:0]  # the child has ended or closed its stdin
        if not self._outgoing:
            self._selector.unregister(stdin)
            if self._then_close:
                stdin.close()

"""Two trainings in two processes that take turns, one optimizer step each.

A side runs ``python -m benchmarks.MODULE``. Wherever a step of its training ends it waits at a `Gate`, which the
parent opens; so exactly one of the two computes at any time, and what else the machine does hits neighbouring steps
of both alike. A side that went on computing behind a closed gate would be timed too low: the CPU time it used while
waiting is reported with every step and checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Self

from benchmarks.environments import ROOT, SETTINGS
from benchmarks.trials import Row

IDLE_CPU_SECONDS = 0.002
IDLE_CPU_SHARE = 0.05
HEARTBEAT_SHARE = 0.01
"""Of the time it waits: clients of servers keep their sessions alive."""


class SideError(RuntimeError):
    """A side ended early, or computed when it was not its turn."""


# --------------------------------------------------------------------------------------------------------------------
# The parent's end


class Side:
    """A child process that trains when it is told to.

    Args:
        name: What its rows are marked with.
        module: Its module in this package.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a child that has gone cannot take what is still in the buffer
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def begin(self, request: Row) -> None:
        """Start a training; returns when it waits before its first step."""
        self._send(request)
        self._receive("ready")

    def step(self) -> Row:
        """Let it do one step; returns its times and counts."""
        self._send({"go": True})
        return self._receive("step")

    def end(self) -> Row:
        """Let it finish (validate, save); returns what the training came to."""
        self._send({"go": True})
        return self._receive("result")

    def run(self, request: Row) -> Row:
        """Let it do what has no steps; returns what that came to."""
        self._send(request)
        return self._receive("result")

    def _send(self, message: Row) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._gone() from error

    def _receive(self, wanted: str) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        answer: Row = json.loads(line)
        if set(answer) != {wanted}:
            raise SideError(f"side {self.name}: expected {wanted!r}, got {line.strip()[:200]}")
        found: Row = answer[wanted]
        return found

    def _gone(self) -> SideError:
        return SideError(f"side {self.name} ended with exit code {self._process.wait()}; see its messages above")


# --------------------------------------------------------------------------------------------------------------------
# The child's end


class Gate:
    """What a training passes between two steps."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers
        self._wall = self._cpu = 0.0

    def open_first(self) -> None:
        """Say that everything is allocated, and wait for the first step's turn."""
        self._answer("ready", {})
        self._wait()

    def step_ended(self, step: int, **counts: float) -> None:
        """Report a step, then wait for the next one's turn. The clocks stand still meanwhile."""
        now, cpu = time.perf_counter(), time.process_time()
        row = {"step": step, "wall_seconds": now - self._wall, "cpu_seconds": cpu - self._cpu, **counts}
        if self._idle_cpu > max(IDLE_CPU_SECONDS, IDLE_CPU_SHARE * row["cpu_seconds"], HEARTBEAT_SHARE * self._waited):
            raise SideError(f"step {step}: {self._idle_cpu:.3f} CPU seconds were used before it was allowed to begin")
        self._answer("step", row)
        self._wait()

    def ended(self, result: Row) -> None:
        """Report what the training came to."""
        self._answer("result", result)

    def _wait(self) -> None:
        before, since = time.process_time(), time.perf_counter()
        if not self._requests.readline():
            raise SystemExit("the parent is gone")
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._idle_cpu, self._waited = self._cpu - before, self._wall - since

    def _answer(self, kind: str, content: Row) -> None:
        self._answers.write(json.dumps({kind: content}) + "\n")
        self._answers.flush()


def serve(train: Callable[[Row, Gate], Row]) -> None:
    """Run trainings as they are asked for. Whatever they print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gate = Gate(sys.stdin, answers)
    for line in iter(sys.stdin.readline, ""):
        gate.ended(train(json.loads(line), gate))


def take_turns(sides: tuple[Side, Side], requests: tuple[Row, Row], steps: int) -> Iterator[tuple[Side, Row]]:
    """Train both, step by step in turn; who goes first changes with every step."""
    for side, request in zip(sides, requests, strict=True):
        side.begin(request)
    for step in range(steps):
        for side in sides[:: 1 if step % 2 == 0 else -1]:
            yield side, side.step()

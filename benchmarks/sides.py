"""Two trainings in two processes that take turns, one optimizer step each.

A side runs ``python -m benchmarks.MODULE``. After each training step it waits at a `Gate`, which the parent opens. So
only one side computes at a time, and other load on the machine affects adjacent steps of both equally. A side that
kept computing behind a closed gate would look too fast, so its CPU time while waiting is checked at every step.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Row

IDLE_CPU_SECONDS = 0.002
IDLE_CPU_SHARE = 0.05
HEARTBEAT_SHARE = 0.01
"""Allowed CPU share of the waiting time, because clients of servers keep their sessions alive."""


class SideError(RuntimeError):
    """A side ended early, or computed while it should wait."""


# --------------------------------------------------------------------------------------------------------------------
# Parent process


class Side:
    """Child process that trains on request.

    Args:
        name: Name of the side in rows.
        module: Module of the side.
        python: Interpreter; by default, that of this process.
        variables: Environment variables that the side has in addition.
    """

    def __init__(
        self, name: str, module: str, python: str = sys.executable, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **SETTINGS, **(variables or {})},
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
        with contextlib.suppress(BrokenPipeError):  # the child may have exited before reading the buffer
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def kill(self) -> None:
        """Ends the side at once; whoever waits for it gets a `SideError`."""
        self._process.kill()

    def begin(self, request: Row) -> None:
        """Starts a training; returns when it waits before its first step."""
        self._send(request)
        self._receive("ready")

    def step(self) -> Row:
        """Runs one step; returns its times and counts."""
        self._send({"go": True})
        return self._receive("step")

    def end(self) -> Row:
        """Lets the training finish (validate, save); returns its result."""
        self._send({"go": True})
        return self._receive("result")

    def run(self, request: Row) -> Row:
        """Runs a request without steps; returns its result."""
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
        return SideError(f"side {self.name} ended with exit code {self._process.wait()}; see its output above")


# --------------------------------------------------------------------------------------------------------------------
# Child process


class Gate:
    """Gate at which a training waits between two steps."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers
        self._wall = self._cpu = 0.0
        self.measured: Callable[[], dict[str, float]] = dict  # further numbers of the step that has just ended

    def open_first(self) -> None:
        """Reports that everything is allocated, and waits for the first turn."""
        self._answer("ready", {})
        self._wait()

    def step_ended(self, step: int, **counts: float) -> None:
        """Reports a step, then waits for the next turn; waiting is not timed."""
        now, cpu = time.perf_counter(), time.process_time()
        row = {"step": step, "wall_seconds": now - self._wall, "cpu_seconds": cpu - self._cpu, **counts}
        row |= self.measured()
        if self._idle_cpu > max(IDLE_CPU_SECONDS, IDLE_CPU_SHARE * row["cpu_seconds"], HEARTBEAT_SHARE * self._waited):
            raise SideError(f"step {step}: the side used {self._idle_cpu:.3f} CPU seconds while it should wait")
        self._answer("step", row)
        self._wait()

    def ended(self, result: Row) -> None:
        """Reports the result of the training."""
        self._answer("result", result)

    def _wait(self) -> None:
        before, since = time.process_time(), time.perf_counter()
        if not self._requests.readline():
            raise SystemExit("the parent process has exited")
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._idle_cpu, self._waited = self._cpu - before, self._wall - since

    def _answer(self, kind: str, content: Row) -> None:
        self._answers.write(json.dumps({kind: content}) + "\n")
        self._answers.flush()


def serve(train: Callable[[Row, Gate], Row]) -> None:
    """Runs the requested trainings; redirects their output to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gate = Gate(sys.stdin, answers)
    for line in iter(sys.stdin.readline, ""):
        gate.ended(train(json.loads(line), gate))


def take_turns(sides: Sequence[Side], requests: Sequence[Row], steps: int) -> Iterator[tuple[Side, Row]]:
    """Trains all sides, taking turns at every step; the order changes with every step."""
    for side, request in zip(sides, requests, strict=True):
        side.begin(request)
    for step in range(steps):
        for side in sides[:: 1 if step % 2 == 0 else -1]:
            yield side, side.step()

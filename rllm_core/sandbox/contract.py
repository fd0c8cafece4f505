"""What a sandbox must do for code that a model wrote."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a piece of foreign code may use.

    Attributes:
        wall_seconds: Time on the clock, sleeping included; then it is killed.
        memory_bytes: Address space. Libraries reserve much more of it than they use: torch needs 8 GiB to be imported.
        output_bytes: What it may answer or print, and the size of any file it writes.

    Raises:
        ValueError: If one is not positive.
    """

    wall_seconds: float = 10.0
    memory_bytes: int = 2 << 30
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "memory_bytes", "output_bytes"):
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise ValueError(f"{name} = {value!r} must be positive and finite")


Outcome = Literal["finished", "timeout", "output_limit", "killed"]


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """How a program ended.

    Attributes:
        outcome: ``finished`` by itself, whatever its exit code; ended at its wall clock or its output limit; or
            ``killed`` by a signal, as out of memory can be.
        exit_code: None unless it finished.
        stdout: What it printed, as far as the limit allowed; undecodable bytes are replaced.
        stderr: The same for its errors; Python's ``MemoryError`` is seen here.
        wall_seconds: How long it took.
    """

    outcome: Outcome
    exit_code: int | None
    stdout: str
    stderr: str
    wall_seconds: float


class Sandbox(ABC):
    """Runs programs that a model wrote. One instance serves all rollouts of a run, concurrently.

    What is promised to workflows: a call ends within the wall clock and a moment; whatever the program does, the call
    returns a result; nothing of the program is left running; two programs see nothing of each other.

    Attributes:
        name: The name it is selected by, with ``rollout.sandbox`` in the run file.
        isolates: Whether the program is kept from this user's files, processes and network. Only then may it hold
            anything that matters to lose.
    """

    name: ClassVar[str]
    isolates: ClassVar[bool] = False

    @abstractmethod
    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """Run a Python program in an empty folder.

        Args:
            source: The program.
            stdin: What it can read.
            limits: By default, those of `Limits`.

        Raises:
            OSError: If no program can be started here at all; never because of what is in it.
        """

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds. Called once, after the last program of a run."""

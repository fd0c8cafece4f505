"""Limits of untrusted code, and the result of running it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits for untrusted code.

    Attributes:
        wall_seconds: Wall-clock time, including sleep, after which the code is killed.
        memory_bytes: Address space. Libraries reserve much more than they use: importing torch takes 8 GiB.
        output_bytes: Maximum size of the result or printed output, and of any file that the code writes.

    Raises:
        ValueError: If a limit is not positive and finite.
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
        outcome: ``finished`` with any exit code, ended by ``timeout`` or ``output_limit``, or ``killed`` by a signal,
            for example when out of memory.
        exit_code: Exit code, or None unless it finished.
        stdout: Standard output, up to the limit. Undecodable bytes are replaced.
        stderr: Standard error, in the same form. Python's ``MemoryError`` appears here.
        wall_seconds: Duration.
    """

    outcome: Outcome
    exit_code: int | None
    stdout: str
    stderr: str
    wall_seconds: float

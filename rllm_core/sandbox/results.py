"""Limits of untrusted code, and the result of running it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args


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

    Raises:
        ValueError: If the outcome is another one, the exit code is missing or superfluous, or the output is not text.
    """

    outcome: Outcome
    exit_code: int | None
    stdout: str
    stderr: str
    wall_seconds: float

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"outcome = {self.outcome!r:.80} must be one of {', '.join(get_args(Outcome))}")
        if isinstance(self.exit_code, int) != (self.outcome == "finished"):
            raise ValueError(
                f"exit_code = {self.exit_code!r:.80} with outcome {self.outcome!r}; a program that finished has an "
                "integer, any other None"
            )
        if not isinstance(self.stdout, str) or not isinstance(self.stderr, str):
            raise ValueError(
                f"stdout and stderr must be text, got {type(self.stdout).__name__} and {type(self.stderr).__name__}"
            )

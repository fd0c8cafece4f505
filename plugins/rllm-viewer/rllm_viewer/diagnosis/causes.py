"""The cause of a problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """The causes of a problem, as far as the run's answers can tell.

    Attributes:
        causes: Usual causes, the most likely first.
        decides: Command that distinguishes the causes, with ``RUN`` for the folder; empty for a single cause.
        seen: What the answers show, if anything.
    """

    causes: tuple[str, ...]
    decides: str = "rllm-core show RUN"
    seen: str = ""

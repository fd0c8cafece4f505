"""Why a trouble happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Why a trouble happens, as far as the answers of the run can tell.

    Attributes:
        causes: Usual causes, the most likely first.
        decides: Command that tells the causes apart, with ``RUN`` for the folder; empty for a single cause.
        seen: What the answers show, if anything.
    """

    causes: tuple[str, ...]
    decides: str = "rllm-core show RUN"
    seen: str = ""

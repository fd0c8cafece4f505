"""Sandbox ``bwrap``: isolates model-written programs with bubblewrap."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import SandboxProvider

__all__ = ["__version__", "sandboxes"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def sandboxes() -> list[SandboxProvider]:
    """Provides sandbox ``bwrap``."""
    return [
        SandboxProvider(
            name="bwrap",
            load="rllm_bwrap.sandbox:BwrapSandbox",
            summary="No network, no files of yours, no other processes; needs bubblewrap on Linux.",
        )
    ]

"""Hooks of sandbox ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import SandboxProvider

RLLM_CORE_API = "1.0"


@hookimpl
def sandboxes() -> list[SandboxProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        SandboxProvider(
            name="placeholder",
            load="rllm_placeholder.sandbox:PlaceholderSandbox",
            summary="Runs each program in a process with limits; isolates nothing.",
        )
    ]

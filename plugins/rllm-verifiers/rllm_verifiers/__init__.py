"""Trains on unmodified tasksets of the package verifiers.

The package is also a verifiers harness with the id ``rllm_verifiers``: verifiers finds a harness by module name, in the
module's ``__all__``.
"""

from __future__ import annotations

from typing import Any

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

__all__ = ["ChatHarness"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Provides workflow ``verifiers``."""
    return [
        WorkflowProvider(
            name="verifiers",
            load="rllm_verifiers.workflow:VerifiersWorkflow",
            config="rllm_verifiers.config:VerifiersConfig",
            variants="rllm_verifiers.catalog:variants",
            summary="Play an environment of the package verifiers, with its own rewards.",
            blocks=True,
            waits_for_others=True,
        )
    ]


def __getattr__(name: str) -> Any:
    """Imports the harness when verifiers asks for it, because listing plugins must not need verifiers."""
    if name == "ChatHarness":
        from rllm_verifiers.harness import ChatHarness

        return ChatHarness
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

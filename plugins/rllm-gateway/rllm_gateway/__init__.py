"""Trains unmodified agents that call an OpenAI- or Anthropic-compatible endpoint."""

from __future__ import annotations

from typing import Any

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

__all__ = ["Endpoint", "Gateway", "GatewayConfig", "GatewayWorkflow"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Provides workflow ``agent``."""
    return [
        WorkflowProvider(
            name="agent",
            load="rllm_gateway.agent:AgentWorkflow",
            config="rllm_gateway.agent:AgentConfig",
            summary="Train a program or a function that talks to the model over HTTP.",
            blocks=True,
            waits_for_others=True,
        )
    ]


def __getattr__(name: str) -> Any:
    """Imports the library on first use, because listing plugins needs no HTTP server."""
    if name in __all__:
        from rllm_gateway import endpoint, gateway, workflow

        return next(getattr(module, name) for module in (workflow, gateway, endpoint) if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Hooks of command ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

RLLM_CORE_API = "1.0"


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Lists what this package provides. Commands are imported only when they are called."""
    return [
        CommandProvider(
            name="placeholder",
            load="rllm_placeholder.command:command",
            summary="Draw the rewards of a run as bars.",
        )
    ]

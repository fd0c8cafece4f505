"""Tools for finished runs of rllm-core; importing this module imports none of them."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

__all__ = ["__version__", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """``verify``."""
    return [
        CommandProvider(
            name="verify",
            load="rllm_viewer.commands.verify:verify",
            summary="Verify that every rollout in a run is accounted for.",
        ),
    ]

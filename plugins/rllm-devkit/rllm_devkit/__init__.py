"""Tools for authors of rllm-core plugins: templates, contract checks, fault injection and a scripted backend.

Importing this module does not import the tools; the commands behind the records load when they are called.
"""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

__all__ = ["__version__", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Provides commands ``new``, ``plugins check`` and ``parser check``."""
    return [
        CommandProvider(
            name="new",
            load="rllm_devkit.commands.new:new",
            summary="Create a plugin package from a template.",
        ),
        CommandProvider(
            name="parser check",
            load="rllm_devkit.commands.parser_check:check",
            summary="Check that conversations with a model stay token-exact.",
        ),
        CommandProvider(
            name="plugins check",
            load="rllm_devkit.commands.plugins_check:check",
            summary="Check a plugin against its contracts.",
        ),
    ]

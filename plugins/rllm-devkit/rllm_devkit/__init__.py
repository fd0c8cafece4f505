"""Checks of what is installed, and tools for authors of rllm-core plugins: templates, contract checks, scripted parts.

Importing this module imports none of them; the commands behind the records load when they are called.
"""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider

__all__ = ["__version__", "cli_commands"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


COMMANDS = (
    ("new", "new:new", "Create a plugin package from a template."),
    ("plugins check", "plugins_check:check", "Check a plugin against its contracts."),
    ("plugins load", "plugins_load:load", "Import each plugin in its own process and report problems."),
    ("plugins show", "plugins_load:show", "Show all details of one plugin."),
    ("parser check", "parser_check:check", "Check that conversations with a model stay token-exact."),
    (
        "algorithms",
        "algorithms:algorithms",
        "List estimators, losses, corrections, group scorers and task samplers.",
    ),
    ("backends", "backends:backends", "List backends and their capabilities."),
    ("doctor", "doctor:doctor", "Check versions and known conflicts."),
)


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Commands that create plugins, check them, and list what is installed in detail."""
    return [
        CommandProvider(name=name, load=f"rllm_devkit.commands.{load}", summary=summary)
        for name, load, summary in COMMANDS
    ]

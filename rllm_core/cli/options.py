"""Options of every command, and the session that keeps them while a command runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from rllm_core.cli.core_commands import CORE_COMMANDS
from rllm_core.text import printable

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

ALL_PLUGINS = "*"


class Session:
    """Global options, and the plugins once a command needs them.

    Args:
        owns_process: Whether the process exists only for this command.

    Attributes:
        has_hung_threads: Whether the command left threads that would keep the process from exiting.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self.verbose = False
        self.has_hung_threads = False
        self.no_plugins: bool | frozenset[str] = False

    def leave_behind(self, left: Sequence[str]) -> None:
        """Reports tasks and threads that could not be stopped; the process exits without waiting for them."""
        if left:
            self.has_hung_threads = True
            click.echo(printable(f"left running, because it did not stop: {', '.join(left)}"), err=True)

    @cached_property
    def plugins(self) -> PluginManager:
        """Plugins of this environment, as allowed by options and settings."""
        from rllm_core.plugins import PluginManager

        return PluginManager.from_environment(no_plugins=self.no_plugins, reserved_commands=CORE_COMMANDS)


class CommandWithOverrides(click.Command):
    """Command with ``-o SECTION.KEY=VALUE``; names the option where it was left out, as in Hydra's overrides."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            hint = f"; to override a key, write -o {quote(rest[0])}" if "=" in rest[0] else ""
            raise click.UsageError(f"unexpected argument {rest[0]!r}{hint}", ctx)
        return rest


def session(context: click.Context | None = None) -> Session:
    """Returns the session of the running command line."""
    context = context or click.get_current_context()
    return context.ensure_object(Session)


def set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Sets whether to show tracebacks and debug messages; a callback of click."""
    session(context).verbose = value
    if value:
        logging.getLogger("rllm_core").setLevel(logging.DEBUG)


def _set_no_plugins(context: click.Context, option: click.Parameter, value: str | None) -> None:
    from rllm_core.plugins.settings import NO_PLUGINS_VARIABLE, split_names

    if value is not None:
        session(context).no_plugins = True if value == ALL_PLUGINS else split_names(value)
        vars(session(context)).pop("plugins", None)  # finding this command may already have created the plugin manager
        if session(context).owns_process:  # child processes must see the same plugins
            os.environ[NO_PLUGINS_VARIABLE] = ",".join(filter(None, [os.environ.get(NO_PLUGINS_VARIABLE), value]))


def no_plugins_option(command: Any) -> Any:
    """Adds ``--no-plugins[=NAME,...]`` to a command."""
    return click.option(
        "--no-plugins",
        metavar="[=NAME,...]",
        callback=_set_no_plugins,
        expose_value=False,
        is_eager=True,
        help="Disable all plugins, or the named ones, for this command.",
    )(command)

"""Commands of the core and of plugins, found by name and imported when they are called."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from rllm_core.cli.core_commands import CORE_COMMANDS
from rllm_core.cli.options import ALL_PLUGINS, Session, session
from rllm_core.errors import PluginError
from rllm_core.providers import CommandProvider, resolve

if TYPE_CHECKING:
    from rllm_core.plugins import Provided

ValueT = TypeVar("ValueT")
INTERRUPTED = 130  # exit code of a shell for SIGINT


class BrokenCommand(click.Command):
    """Placeholder for a plugin command that cannot be loaded; calling it raises the reason."""

    def __init__(self, name: str, error: PluginError) -> None:
        super().__init__(
            name,
            help=f"Cannot be loaded: {error}",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self.error = error

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Raises the error that loading the command raised."""
        raise self.error


class LazyGroup(click.Group):
    """Commands of the core and of plugins, each imported when it is called.

    Args:
        prefix: Words before the names of the group's commands, with a space; empty for ``rllm-core`` itself.
    """

    def __init__(self, *args: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.prefix = prefix

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Allows ``--no-plugins`` without a value: click would take the next word as its value."""
        ctx.ensure_object(Session)
        return super().parse_args(ctx, [f"{a}={ALL_PLUGINS}" if a == "--no-plugins" else a for a in args])

    def invoke(self, ctx: click.Context) -> Any:
        """Invokes the command. Ctrl-C, which a command may not expect, ends it with the exit code for it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted by SIGINT", err=True)
            ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists the names of all commands, the core's first."""
        added, unavailable = self._plugin_commands(ctx)
        return [*self._within(CORE_COMMANDS), *self._within(added), *self._within(unavailable)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command."""
        from rllm_core.plugins.missing import first_party

        name = self.prefix + cmd_name
        if name in CORE_COMMANDS:  # without looking for plugins
            own: click.Command = resolve(CORE_COMMANDS[name].load)
            return own
        command: click.Command | None = None
        plugins = session(ctx).plugins
        try:
            if (CommandProvider, name) in first_party():
                command = plugins.load(plugins.select_first_party(CommandProvider, name))
            elif provided := plugins.providers(CommandProvider).get(name):
                command = plugins.load(provided)
        except PluginError as error:
            command = BrokenCommand(cmd_name, error)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves as click does, but suggests the nearest name for an unknown command."""
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"run rllm-core {self.prefix}--help for a list"
            raise click.UsageError(f"no such command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands from their records, so that help imports no command."""
        added, unavailable = self._plugin_commands(ctx)
        sections = {
            "Commands": {name: command.summary for name, command in self._within(CORE_COMMANDS).items()},
            "Plugin commands": {name: f"{p.record.summary} ({p.plugin.label})" for name, p in added.items()},
            "Unavailable commands": {name: str(error) for name, error in unavailable.items()},
        }
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.removeprefix(self.prefix), text) for name, text in rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes commands from their records, so that completion imports no command."""
        commands = {name: command.summary for name, command in self._within(CORE_COMMANDS).items()}
        added, _ = self._plugin_commands(ctx)
        commands |= {name: provided.record.summary for name, provided in self._within(added).items()}
        items = [CompletionItem(name, help=text) for name, text in commands.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def _within(self, commands: Mapping[str, ValueT]) -> dict[str, ValueT]:
        """Returns the commands of this group, by the single word that calls them."""
        own = {name.removeprefix(self.prefix): c for name, c in commands.items() if name.startswith(self.prefix)}
        return {word: command for word, command in own.items() if " " not in word}

    def _plugin_commands(
        self, ctx: click.Context
    ) -> tuple[dict[str, Provided[CommandProvider]], dict[str, PluginError]]:
        """Returns the commands of plugins, and first-party commands that are unavailable with the reason, by name.

        A group loads first-party plugins only, so that listing the core's own commands never waits for another plugin.
        """
        from rllm_core.plugins.missing import first_party

        plugins = session(ctx).plugins
        added = {} if self.prefix else plugins.providers(CommandProvider)
        unavailable = {}
        for name in (name for kind, name in first_party() if kind is CommandProvider and name.startswith(self.prefix)):
            try:
                added[name] = plugins.select_first_party(CommandProvider, name)
            except PluginError as error:
                unavailable[name] = error
        return added, unavailable

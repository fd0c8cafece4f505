"""Command line. A command's module is imported when the command runs, not when commands are listed."""

from __future__ import annotations

import difflib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from rllm_core.errors import PluginError, UserError
from rllm_core.plugins.watch import STANDARD_ERROR, own_process
from rllm_core.providers import CommandProvider, resolve
from rllm_core.text import printable
from rllm_core.version import __version__

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager, Provided

__all__ = ["CORE_COMMANDS", "LazyGroup", "Session", "cli", "main", "no_plugins_option", "session"]

COMMANDS = {
    "train": ("train:train", "Train a model on a workflow."),
    "eval": ("eval:evaluate", "Evaluate a model on a workflow (pass@k)."),
    "plugins": ("plugins:plugins", "List and manage plugins."),
    "plugins show": ("plugins:show", "Show all details of one plugin."),
    "plugins enable": ("plugins:enable", "Re-enable a disabled plugin."),
    "plugins disable": ("plugins:disable", "Disable a plugin for all runs."),
    "backends": ("backends:backends", "List backends and their capabilities."),
    "engines": ("plugins:engines", "List rollout engines."),
    "parsers": ("plugins:parsers", "List parsers."),
    "parser": ("plugins:parser", "Check a parser with a model's tokenizer."),
    "workflows": ("plugins:workflows", "List workflows."),
    "algorithms": ("algorithms:algorithms", "List estimators, losses, corrections, group scorers and task samplers."),
    "doctor": ("doctor:doctor", "Check versions and known conflicts."),
    "completion": ("completion:completion", "Print a shell completion script."),
}
CORE_COMMANDS = {
    name: CommandProvider(name=name, load=f"{__name__}.{path}", summary=summary)
    for name, (path, summary) in COMMANDS.items()
}

ValueT = TypeVar("ValueT")

ALL_PLUGINS = "*"
EXIT_SECONDS = 20.0
EXIT_HANDLERS_SECONDS = 120.0  # exit handlers may upload something
PYDANTIC_VARIABLE, PYDANTIC_OFF = "PYDANTIC_DISABLE_PLUGINS", "__all__"


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
            click.echo(printable(f"left behind, since it did not stop: {', '.join(left)}"), err=True)

    @cached_property
    def plugins(self) -> PluginManager:
        """Plugins of this environment, as allowed by options and settings."""
        from rllm_core.plugins import PluginManager

        return PluginManager.from_environment(no_plugins=self.no_plugins, reserved_commands=CORE_COMMANDS)


def session(context: click.Context | None = None) -> Session:
    """Returns the session of the running command line."""
    context = context or click.get_current_context()
    return context.ensure_object(Session)


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


def _set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    callback=_set_verbose,
    expose_value=False,
    is_eager=True,
    help="Show tracebacks and debug messages.",
)
@no_plugins_option
@click.version_option(__version__, prog_name="rllm-core")
def cli() -> None:
    """Train and evaluate language agents with reinforcement learning."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line. An error prints one line on stderr and sets the exit code.

    Args:
        args: Arguments to use instead of ``sys.argv[1:]``.
    """
    current = Session(owns_process=args is None)
    if current.owns_process:
        # Pydantic reads the entry points of all installed packages, so one malformed entry_points.txt would break the
        # first model. Set the variable to an empty string to use pydantic plugins.
        os.environ.setdefault(PYDANTIC_VARIABLE, PYDANTIC_OFF)
        own_process()
    try:
        _run(current, args)
    except SystemExit as leaving:
        if current.owns_process:
            _leave_threads(leaving.code if isinstance(leaving.code, int) else 1, current.has_hung_threads)
        raise


def _run(current: Session, args: Sequence[str] | None) -> NoReturn:
    try:
        cli.main(args=None if args is None else list(args), prog_name="rllm-core", obj=current)
    except UserError as error:
        _report(current, error, f"{error.label}{error}", args)
        sys.exit(error.exit_code)
    except Exception as error:
        from rllm_core.plugins.blame import blamed

        hint = "" if current.verbose else " (run rllm-core -v ... for the traceback)"
        _report(current, error, f"error: {blamed(error)}{hint}", args)
        sys.exit(1)
    sys.exit(0)


def _report(current: Session, error: Exception, line: str, args: Sequence[str] | None) -> None:
    """Prints one line on stderr, after the traceback with ``-v``; with ``--json`` also an object on stdout."""
    if current.verbose:
        traceback.print_exception(error)
    click.echo(line, err=True)
    if "--json" in (sys.argv[1:] if args is None else args):
        from rllm_core.plugins.blame import blamed_json

        click.echo(json.dumps({"failure": blamed_json(error)}))


def _leave_threads(exit_code: int, is_hung: bool) -> None:
    """Ends the process if threads keep running; otherwise lets it end as usual, within a time limit.

    Args:
        exit_code: Exit code of the command.
        is_hung: Whether the command has already reported threads that do not stop.
    """
    latest = time.monotonic() + EXIT_SECONDS
    kept_by = [] if is_hung else _lasting_threads()
    while kept_by and time.monotonic() < latest:
        kept_by[0].join(latest - time.monotonic())
        kept_by = _lasting_threads()
    if kept_by:
        named = printable("; ".join(map(_started_by, kept_by)))
        click.echo(f"forced exit, still running after {EXIT_SECONDS:g} s: {named}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if is_hung or kept_by:
        os._exit(exit_code)
    # Exit handlers may be third-party code: if they never end, this prints where they are.
    faulthandler.dump_traceback_later(EXIT_HANDLERS_SECONDS, exit=True, file=STANDARD_ERROR)


def _lasting_threads() -> list[threading.Thread]:
    """Returns threads that keep the process from ending, without those of thread pools, which Python itself stops."""
    lasting = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    if lasting:
        from concurrent.futures.thread import _threads_queues

        lasting = [thread for thread in lasting if thread not in _threads_queues]
    return lasting


def _started_by(thread: threading.Thread) -> str:
    """Returns the name of a thread, with the plugin whose import started it."""
    from rllm_core.plugins.loading import LEFT_THREADS

    plugin = LEFT_THREADS.get(thread)
    if plugin is None:
        return thread.name
    return f"{thread.name}, started by plugin {plugin!r} (to disable it: rllm-core plugins disable {plugin})"

"""The command line. A command's module is imported when the command runs, and not for the list of commands."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from rllm_core import __version__
from rllm_core.errors import PluginError, UserError
from rllm_core.foreign import printable
from rllm_core.providers import Command
from rllm_core.witness import WITNESS

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager, Provided

__all__ = ["CORE_COMMANDS", "LazyGroup", "Session", "cli", "main", "no_plugins_option", "session"]

CORE_COMMANDS = {
    command.name: command
    for command in (
        Command(name="train", load="rllm_core.cli.train:train", summary="Train a model on a workflow."),
        Command(
            name="eval",
            load="rllm_core.cli.eval:evaluate",
            summary="Measure a model on a workflow: pass@k with a confidence interval.",
        ),
        Command(name="verify", load="rllm_core.cli.verify:verify", summary="Prove that a run's books balance."),
        Command(name="new", load="rllm_core.cli.new:new", summary="Make a package for a provider of your own."),
        Command(name="plugins", load="rllm_core.cli.plugins:plugins", summary="Show what is installed."),
        Command(
            name="backends",
            load="rllm_core.cli.backends:backends",
            summary="List training backends and what each can do.",
        ),
        Command(name="engines", load="rllm_core.cli.plugins:engines", summary="List rollout engines."),
        Command(name="parsers", load="rllm_core.cli.plugins:parsers", summary="List parsers."),
        Command(name="parser", load="rllm_core.cli.parser:parser", summary="Check that conversations stay exact."),
        Command(name="workflows", load="rllm_core.cli.plugins:workflows", summary="List workflows."),
        Command(
            name="algorithms",
            load="rllm_core.cli.algorithms:algorithms",
            summary="List advantage estimators, policy losses and corrections.",
        ),
        Command(
            name="doctor",
            load="rllm_core.cli.doctor:doctor",
            summary="Check versions, missing pieces and known-bad combinations.",
        ),
        Command(
            name="completion",
            load="rllm_core.cli.completion:completion",
            summary="Print what makes a shell complete commands, options and names.",
        ),
    )
}

ALL_PLUGINS = "*"
EXIT_SECONDS = 20.0
PYDANTIC_VARIABLE, PYDANTIC_OFF = "PYDANTIC_DISABLE_PLUGINS", "__all__"


class Session:
    """What the global options say, and the plugins as far as a command needs them.

    Args:
        owns_process: Whether the process is there for the command, and ends with it.

    Attributes:
        has_hung_threads: Whether the command left something behind that would keep the process from ending.
    """

    def __init__(self, *, owns_process: bool = False) -> None:
        self.owns_process = owns_process
        self.verbose = False
        self.has_hung_threads = False
        self.no_plugins: bool | frozenset[str] = False

    def leave_behind(self, left: Sequence[str]) -> None:
        """Name what could not be stopped; the process ends without it."""
        if left:
            self.has_hung_threads = True
            click.echo(printable(f"left behind, since it did not stop: {', '.join(left)}"), err=True)

    @cached_property
    def plugins(self) -> PluginManager:
        """The plugins of this environment, as the options and settings allow them."""
        from rllm_core.plugins import PluginManager

        return PluginManager.from_environment(no_plugins=self.no_plugins, reserved_commands=CORE_COMMANDS)


def session(context: click.Context | None = None) -> Session:
    """The session of the running command line."""
    context = context or click.get_current_context()
    return context.ensure_object(Session)


class BrokenCommand(click.Command):
    """Stands in for a plugin's command that cannot be loaded, and says why when it is called."""

    def __init__(self, name: str, error: PluginError) -> None:
        super().__init__(
            name,
            help=f"Cannot be loaded: {error}",
            add_help_option=True,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        self.error = error

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Raise what loading the command raised."""
        raise self.error


class LazyGroup(click.Group):
    """The core's commands and the plugins', each imported when it is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let ``--no-plugins`` stand alone: click would take the next word for its value."""
        ctx.ensure_object(Session)
        return super().parse_args(ctx, [f"{a}={ALL_PLUGINS}" if a == "--no-plugins" else a for a in args])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, the core's first."""
        return [*CORE_COMMANDS, *self._plugin_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name in CORE_COMMANDS:
            module, _, attribute = CORE_COMMANDS[cmd_name].load.partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        provided = self._plugin_commands(ctx).get(cmd_name)
        if provided is None:
            return None
        try:
            loaded = session(ctx).plugins.load(provided)
        except PluginError as error:
            return BrokenCommand(cmd_name, error)
        if not isinstance(loaded, click.Command):
            problem = (
                f"{provided.record.load} ({provided.plugin.label}) is a {type(loaded).__name__}, not a click.Command"
            )
            return BrokenCommand(cmd_name, PluginError(problem))
        return loaded

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, but an unknown command comes with the nearest one."""
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "rllm-core --help lists them"
            raise click.UsageError(f"no such command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by their records, so that help imports no command."""
        rows = [(command.name, command.summary) for command in CORE_COMMANDS.values()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        added = [(name, f"{p.record.summary} ({p.plugin.label})") for name, p in self._plugin_commands(ctx).items()]
        if added:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(added)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands by their records, so that completion imports no command."""
        commands = {name: command.summary for name, command in CORE_COMMANDS.items()}
        commands |= {name: provided.record.summary for name, provided in self._plugin_commands(ctx).items()}
        items = [CompletionItem(name, help=text) for name, text in commands.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def _plugin_commands(self, ctx: click.Context) -> dict[str, Provided[Command]]:
        return session(ctx).plugins.providers(Command)


def _set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
    session(context).verbose = value
    if value:
        logging.getLogger("rllm_core").setLevel(logging.DEBUG)


def _set_no_plugins(context: click.Context, option: click.Parameter, value: str | None) -> None:
    from rllm_core.discovery import NO_PLUGINS_VARIABLE, split_names

    if value is not None:
        session(context).no_plugins = True if value == ALL_PLUGINS else split_names(value)
        if session(context).owns_process:  # those that it starts are to see the same plugins
            os.environ[NO_PLUGINS_VARIABLE] = ",".join(filter(None, [os.environ.get(NO_PLUGINS_VARIABLE), value]))


def no_plugins_option(command: Any) -> Any:
    """Add ``--no-plugins[=NAME,...]`` to a command."""
    return click.option(
        "--no-plugins",
        metavar="[=NAME,...]",
        callback=_set_no_plugins,
        expose_value=False,
        is_eager=True,
        help="Leave out all plugins, or these.",
    )(command)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-v", "--verbose", is_flag=True, callback=_set_verbose, expose_value=False, is_eager=True, help="Show tracebacks."
)
@no_plugins_option
@click.version_option(__version__, prog_name="rllm-core")
def cli() -> None:
    """Train language agents with reinforcement learning."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line: one line on stderr for an error, and an exit code.

    Args:
        args: Instead of ``sys.argv[1:]``.
    """
    current = Session(owns_process=args is None)
    if current.owns_process:
        # Of every installed package, not only of ours: one malformed entry_points.txt anywhere would break the first
        # model that pydantic makes. Who wants its plugins sets the variable to nothing.
        os.environ.setdefault(PYDANTIC_VARIABLE, PYDANTIC_OFF)
        WITNESS.call()
    try:
        _run(current, args)
    except SystemExit as leaving:
        if current.owns_process:
            _end_in_time(leaving.code if isinstance(leaving.code, int) else 1)
        raise


def _run(current: Session, args: Sequence[str] | None) -> NoReturn:
    try:
        cli.main(args=None if args is None else list(args), prog_name="rllm-core", obj=current)
    except SystemExit as leaving:  # click's own way out
        if not current.has_hung_threads:
            raise
        _leave(current, leaving.code if isinstance(leaving.code, int) else 1)
    except UserError as error:
        _report(current, error, f"{error.label}{error}", args)
        _leave(current, error.exit_code)
    except Exception as error:
        from rllm_core.blame import blamed

        hint = "" if current.verbose else " (run rllm-core -v ... for the traceback)"
        _report(current, error, f"error: {blamed(error)}{hint}", args)
        _leave(current, 1)
    _leave(current, 0)


def _report(current: Session, error: Exception, line: str, args: Sequence[str] | None) -> None:
    """One line on stderr, with ``-v`` after the traceback; with ``--json`` an object on stdout, too."""
    if current.verbose:
        traceback.print_exception(error)
    click.echo(line, err=True)
    if "--json" in (sys.argv[1:] if args is None else args):
        from rllm_core.blame import blamed_json

        click.echo(json.dumps({"failure": blamed_json(error)}))


def _leave(current: Session, exit_code: int) -> NoReturn:
    if current.has_hung_threads:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _end_in_time(exit_code: int) -> None:
    """See to it that threads and exit handlers of plugins do not keep the process for ever."""

    def give_up() -> None:
        click.echo(f"after {EXIT_SECONDS:g} s still running, and ended: {printable(_kept_by())}", err=True)
        os._exit(exit_code)

    sys.stdout.flush()
    timer = threading.Timer(EXIT_SECONDS, give_up)
    timer.daemon = True
    timer.start()


def _kept_by() -> str:
    """What keeps the process from ending, and the plugins that have left it there."""
    from rllm_core.loading import LEFT_HANDLERS, LEFT_THREADS

    def of(plugin: str) -> str:
        return f"plugin {plugin!r} (to leave it out: rllm-core plugins disable {plugin})"

    threads = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if threads:
        owners = [(thread.name, LEFT_THREADS.get(thread)) for thread in threads]
        return "; ".join(name if owner is None else f"{name}, started by {of(owner)}" for name, owner in owners)
    return "exit handlers" + (f" of {'; '.join(map(of, LEFT_HANDLERS))}" if LEFT_HANDLERS else "")

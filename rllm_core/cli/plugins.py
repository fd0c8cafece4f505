"""``rllm-core plugins``, and the commands that list providers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from rllm_core.cli import LazyGroup, no_plugins_option, session
from rllm_core.cli.completion import installed
from rllm_core.cli.tables import echo_json, echo_not_installed, echo_table, provider_row
from rllm_core.errors import PluginError
from rllm_core.plugins import CORE_PLUGIN, PluginInfo, PluginManager
from rllm_core.providers import CommandProvider, EngineProvider, ParserProvider, Provider, WorkflowProvider

LOAD = "plugins load"
LISTED = ("name", "package", "version", "status")
UNKNOWN = {"hooks": None, "provides": None, "warnings": None, "load_seconds": None}  # without importing the plugin


@click.group(cls=LazyGroup, prefix="plugins ", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "show_all", is_flag=True, help="Include the core's own providers.")
@click.option("--load", is_flag=True, help="Same as rllm-core plugins load.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="With --load, timeout for importing one plugin, in seconds.",
)
@no_plugins_option
@click.pass_context
def plugins(context: click.Context, as_json: bool, show_all: bool, load: bool, deadline_seconds: float | None) -> None:
    """List and manage plugins. Reads only metadata, unless --load is given."""
    if context.invoked_subcommand is not None:
        return
    manager = session(context).plugins
    if load:
        command = manager.load(manager.select_first_party(CommandProvider, LOAD))
        deadline = {} if deadline_seconds is None else {"deadline_seconds": deadline_seconds}
        context.invoke(command, as_json=as_json, show_all=show_all, **deadline)
        return
    rows = [{**info.to_json(), **UNKNOWN} for info in listed(manager, show_all=show_all)]
    if as_json:
        echo_json(rows)
    elif rows:
        cells = [[*(row[key] for key in LISTED), row["value"], row["error"] or ""] for row in rows]
        echo_table([*LISTED, "value", "note"], cells)
    else:
        echo_none()
    if not as_json:
        echo_not_installed(manager)
    fail_if_strict(context, rows)


def listed(manager: PluginManager, *, show_all: bool) -> list[PluginInfo]:
    """Returns the plugins to list: the core's own providers only with ``show_all``, or if they are in conflict."""
    return [info for info in manager.plugins() if show_all or info.name != CORE_PLUGIN or info.status == "conflict"]


def echo_none() -> None:
    """Prints what to install if there are no plugins."""
    first = "pip install rllm-local rllm-renderers rllm-workflows"
    click.echo(f"no plugins are installed; for a first run: {first}", err=True)


def fail_if_strict(context: click.Context, rows: Sequence[dict[str, Any]]) -> None:
    """Exits with 1 if a plugin cannot be used and ``RLLM_PLUGINS_STRICT`` is set."""
    if session(context).plugins.settings.strict and any(row["status"] in ("broken", "conflict") for row in rows):
        context.exit(1)


@click.command()
@click.argument("name", shell_complete=installed)
@click.pass_context
def enable(context: click.Context, name: str) -> None:
    """Re-enable a disabled plugin."""
    from rllm_core.plugins.settings import plugins_file, read_disabled, write_disabled

    disabled = read_disabled()
    matching = {entry for entry in disabled if entry == name or entry.rpartition("/")[2] == name}
    if not matching:
        session(context).plugins.find(name)
        click.echo(f"plugin {name!r} is not disabled in {plugins_file()}")
    else:
        click.echo(f"plugin {name!r} is enabled in {write_disabled(disabled - matching)}")
    _say_if_overridden()


@click.command()
@click.argument("name", shell_complete=installed)
@click.pass_context
def disable(context: click.Context, name: str) -> None:
    """Disable a plugin for all runs. If two have the same name, give DISTRIBUTION/NAME."""
    from rllm_core.plugins.settings import read_disabled, write_disabled

    if all(info.package == "rllm-core" for info in session(context).plugins.find(name)):
        raise PluginError("the core's own providers cannot be disabled")
    click.echo(f"plugin {name!r} is disabled in {write_disabled(read_disabled() | {name})}")
    _say_if_overridden()


def _say_if_overridden() -> None:
    import os

    if "RLLM_PLUGINS" in os.environ:
        click.echo("RLLM_PLUGINS is set and overrides this file", err=True)


# --------------------------------------------------------------------------------------------------------------------
# Providers


def _listing(name: str, kind: type[Provider], described: str) -> click.Command:
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @no_plugins_option
    @click.pass_context
    def command(context: click.Context, as_json: bool) -> None:
        plugins = session(context).plugins
        provided = plugins.providers(kind)
        if as_json:
            echo_json([provider_row(name, one) for name, one in provided.items()])
            return
        if provided:
            rows = [[name, one.record.summary, one.plugin.label] for name, one in provided.items()]
            echo_table(["name", "summary", "package"], rows)
        else:
            click.echo(
                f"no {kind.kind}s are installed; run rllm-core plugins to see the status of every plugin", err=True
            )
        echo_not_installed(plugins, kind)

    return click.command(name, help=described)(command)


engines = _listing("engines", EngineProvider, "List rollout engines.")
parsers = _listing("parsers", ParserProvider, "List parsers.")
workflows = _listing("workflows", WorkflowProvider, "List workflows.")


@click.group(cls=LazyGroup, prefix="parser ")
def parser() -> None:
    """Check a parser with a model's tokenizer."""

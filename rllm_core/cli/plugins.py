"""``rllm-core plugins``, and the commands that list providers."""

from __future__ import annotations

from typing import Any

import click

from rllm_core.cli import CORE_COMMANDS, LazyGroup, no_plugins_option, session
from rllm_core.cli.completion import installed
from rllm_core.cli.tables import echo_json, echo_not_installed, echo_table, provider_row
from rllm_core.errors import PluginError
from rllm_core.plugins import CORE_PLUGIN, PluginInfo, PluginManager
from rllm_core.providers import EngineProvider, ParserProvider, Provider, WorkflowProvider
from rllm_core.text import printable_lines

DEADLINE_SECONDS = 30.0


@click.group(cls=LazyGroup, prefix="plugins ", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "show_all", is_flag=True, help="Include the core's own providers.")
@click.option("--load", is_flag=True, help="Import each plugin in its own process and report problems.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE_SECONDS,
    show_default=True,
    help="With --load, timeout for importing one plugin, in seconds.",
)
@no_plugins_option
@click.pass_context
def plugins(context: click.Context, as_json: bool, show_all: bool, load: bool, deadline_seconds: float) -> None:
    """List and manage plugins. Reads only metadata, unless --load is given."""
    if context.invoked_subcommand is not None:
        return
    manager = session(context).plugins
    infos = [info for info in manager.plugins() if show_all or info.name != CORE_PLUGIN or info.status == "conflict"]
    rows = _rows(infos, load=load, deadline_seconds=deadline_seconds, verbose=session(context).verbose)
    if as_json:
        echo_json(rows)
    elif rows:
        details = ["hooks", "provides"] if load else ["value"]
        cells = []
        for row in rows:
            shown = [row["name"], row["package"], row["version"], row["status"]]
            shown += [", ".join(row["hooks"] or ()), _provides(row)] if load else [row["value"]]
            cells.append([*shown, row["error"] or "; ".join(row["warnings"] or ())])
        echo_table(["name", "package", "version", "status", *details, "note"], cells)
    else:
        first = "pip install rllm-local rllm-renderers rllm-workflows"
        click.echo(f"no plugins are installed; for a first run: {first}", err=True)
    if not as_json:
        echo_not_installed(manager)
    _fail_if_strict(context, manager, rows)


@click.command()
@click.argument("name", shell_complete=installed)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def show(context: click.Context, name: str, as_json: bool) -> None:
    """Show all details of one plugin. Imports it in its own process."""
    from rllm_core.plugins.discovery import installed_plugins
    from rllm_core.plugins.requirements import unmet

    manager = session(context).plugins
    rows = _rows(manager.find(name), load=True, deadline_seconds=DEADLINE_SECONDS, verbose=session(context).verbose)
    for row in rows:
        for candidate in installed_plugins():
            if (candidate.package, candidate.name, candidate.value) == (row["package"], row["name"], row["value"]):
                row["requires"] = list(candidate.requires)
                row["missing"] = [lack.requirement for lack in unmet(candidate.package, candidate.requires)]
    if as_json:
        echo_json(rows)
    else:
        for row in rows:
            shown = {**row, "provides": _provides(row), "failure": None}  # repeats the error
            lines = [
                [key, ", ".join(value) if isinstance(value, list | tuple) else str(value)]
                for key, value in shown.items()
                if value not in (None, "", [], ())
            ]
            echo_table(["plugin", row["name"]], [line for line in lines if line[0] != "name"])
    _fail_if_strict(context, manager, rows)


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


def _rows(
    infos: list[PluginInfo], *, load: bool, deadline_seconds: float, verbose: bool = False
) -> list[dict[str, Any]]:
    """Builds one JSON object per plugin, always with the same keys; without ``--load``, some are null."""
    if not load:
        unknown = {"hooks": None, "provides": None, "warnings": None, "load_seconds": None}
        return [{**info.to_json(), **unknown} for info in infos]
    from rllm_core.plugins.probe import probe_all

    rows = []
    for health in probe_all(infos, deadline_seconds, CORE_COMMANDS):
        plugin = health.plugin
        if verbose and health.trace is not None:
            click.echo(printable_lines(f"plugin {plugin.name!r} ({plugin.label}):\n{health.trace}"), err=True)
        changes = [f"changes {what} when it is loaded" for what in health.changed]
        found = {"hooks": health.hooks, "provides": health.provides, "warnings": [*health.warnings, *changes]}
        rows.append({**plugin.to_json(), **found, "load_seconds": health.load_seconds})
    return rows


def _provides(row: dict[str, Any]) -> str:
    return ", ".join(f"{provided['kind']} {provided['name']}" for provided in row["provides"] or ())


def _fail_if_strict(context: click.Context, manager: PluginManager, rows: list[dict[str, Any]]) -> None:
    if manager.settings.strict and any(row["status"] in ("broken", "conflict") for row in rows):
        context.exit(1)


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

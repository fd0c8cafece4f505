"""``rllm-core plugins`` and the lists of what can be selected."""

from __future__ import annotations

from typing import Any

import click

from rllm_core.cli import no_plugins_option, session
from rllm_core.cli.completion import installed
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import PluginError
from rllm_core.plugins import CORE_PLUGIN, PluginInfo, PluginManager
from rllm_core.providers import Engine, Parser, Provider, Workflow

DEADLINE_SECONDS = 30.0
CHECK_DEADLINE_SECONDS = 600.0


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "show_all", is_flag=True, help="Show what the core itself provides, too.")
@click.option("--load", is_flag=True, help="Import each plugin in a process of its own and report on its health.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE_SECONDS,
    show_default=True,
    help="With --load: how long importing one plugin may take.",
)
@no_plugins_option
@click.pass_context
def plugins(context: click.Context, as_json: bool, show_all: bool, load: bool, deadline_seconds: float) -> None:
    """Show what is installed. Reads metadata only; --load imports."""
    if context.invoked_subcommand is not None:
        return
    manager = session(context).plugins
    infos = [info for info in manager.plugins() if show_all or info.name != CORE_PLUGIN or info.status == "conflict"]
    rows = _rows(infos, load=load, deadline_seconds=deadline_seconds)
    if as_json:
        echo_json(rows)
    elif load and rows:
        echo_table(
            ["name", "package", "version", "status", "hooks", "provides", "note"],
            [[*_identity(row), ", ".join(row["hooks"] or ()), _provides(row), _note(row)] for row in rows],
        )
    elif rows:
        echo_table(
            ["name", "package", "version", "status", "value", "note"],
            [[*_identity(row), row["value"], _note(row)] for row in rows],
        )
    else:
        first = "pip install rllm-local rllm-renderers rllm-workflows"
        click.echo(f"no plugins are installed; for a first run: {first}", err=True)
    _fail_if_strict(context, manager, rows)


@plugins.command()
@click.argument("name", shell_complete=installed)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def show(context: click.Context, name: str, as_json: bool) -> None:
    """Show everything about one plugin; imports it in a process of its own."""
    from rllm_core.discovery import installed_plugins
    from rllm_core.requirements import unmet

    manager = session(context).plugins
    rows = _rows(manager.find(name), load=True, deadline_seconds=DEADLINE_SECONDS)
    for row in rows:
        for candidate in installed_plugins():
            if (candidate.package, candidate.name, candidate.value) == (row["package"], row["name"], row["value"]):
                row["requires"] = list(candidate.requires)
                row["missing"] = [lack.requirement for lack in unmet(candidate.package, candidate.requires)]
    if as_json:
        echo_json(rows)
    else:
        for row in rows:
            shown = {**row, "provides": _provides(row)}
            lines = [
                [key, ", ".join(value) if isinstance(value, list) else str(value)]
                for key, value in shown.items()
                if value not in (None, "", [])
            ]
            echo_table(["plugin", row["name"]], [line for line in lines if line[0] != "name"])
    _fail_if_strict(context, manager, rows)


@plugins.command()
@click.argument("name", shell_complete=installed)
@click.option("-o", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Set a key; repeatable.")
@click.option("--model", default="", help="Folder or hub name of a model, for what needs one.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=CHECK_DEADLINE_SECONDS,
    show_default=True,
    help="How long the checks of one provider may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@no_plugins_option
@click.pass_context
def check(
    context: click.Context, name: str, overrides: tuple[str, ...], model: str, deadline_seconds: float, as_json: bool
) -> None:
    """Hold a plugin, and everything it provides, to what it has to be.

    Looks at its metadata and its import, then builds each provider with default settings and puts it through the checks
    of its kind, each in a process of its own. Exits with 1 if a check failed.
    """
    from rllm_core.cli.check import Wishes, check_plugin

    manager = session(context).plugins
    [plugin, *others] = manager.find(name)
    if others:
        conflict = next((info.error for info in (plugin, *others) if info.status == "conflict"), None)
        raise PluginError(conflict or f"{name!r} names several plugins; name one as DISTRIBUTION/NAME")
    beside = [
        info for info in manager.plugins() if info.status == "available" and CORE_PLUGIN != info.name != plugin.name
    ]
    groups = check_plugin(plugin, beside, Wishes(overrides, model, deadline_seconds))
    outcomes = [result.outcome for group in groups for result in group.checks]
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
    verdict = "failed" if counts["failed"] else "passed"
    if as_json:
        about = {"plugin": plugin.name, "package": plugin.package, "version": plugin.version, "value": plugin.value}
        echo_json({**about, "outcome": verdict, **counts, "groups": [group.to_json() for group in groups]})
    else:
        for group in groups:
            rows = [[result.name, result.outcome, result.detail] for result in group.checks]
            echo_table([f"{group.kind} {group.name}", "result", "seen"], rows)
            click.echo()
        counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        click.echo(f"{plugin.label}, plugin {plugin.name!r}: {verdict} ({counted})")
    context.exit(1 if counts["failed"] else 0)


@plugins.command()
@click.argument("name", shell_complete=installed)
@click.pass_context
def enable(context: click.Context, name: str) -> None:
    """Let a plugin be used again that was disabled."""
    from rllm_core.discovery import plugins_file, read_disabled, write_disabled

    disabled = read_disabled()
    matching = {entry for entry in disabled if entry == name or entry.rpartition("/")[2] == name}
    if not matching:
        session(context).plugins.find(name)
        click.echo(f"plugin {name!r} is not disabled in {plugins_file()}")
    else:
        click.echo(f"plugin {name!r} is enabled in {write_disabled(disabled - matching)}")
    _say_if_overridden()


@plugins.command()
@click.argument("name", shell_complete=installed)
@click.pass_context
def disable(context: click.Context, name: str) -> None:
    """Switch a plugin off for all runs; of two with one name, by DISTRIBUTION/NAME."""
    from rllm_core.discovery import read_disabled, write_disabled

    if all(info.package == "rllm-core" for info in session(context).plugins.find(name)):
        raise PluginError("the core's own providers cannot be disabled")
    click.echo(f"plugin {name!r} is disabled in {write_disabled(read_disabled() | {name})}")
    _say_if_overridden()


def _say_if_overridden() -> None:
    import os

    if "RLLM_PLUGINS" in os.environ:
        click.echo("RLLM_PLUGINS is set and overrides this file", err=True)


def _rows(infos: list[PluginInfo], *, load: bool, deadline_seconds: float) -> list[dict[str, Any]]:
    """One JSON object per plugin, always with the same keys; what only ``--load`` knows is null without it."""
    if not load:
        unknown = {"hooks": None, "provides": None, "warnings": None, "load_seconds": None}
        return [{**info.to_json(), **unknown} for info in infos]
    from rllm_core.cli.probe import probe_all

    return [
        {
            **health.plugin.to_json(),
            "hooks": list(health.hooks),
            "provides": list(health.provides),
            "warnings": list(health.warnings),
            "load_seconds": health.load_seconds,
        }
        for health in probe_all(infos, deadline_seconds)
    ]


def _identity(row: dict[str, Any]) -> list[str]:
    return [row["name"], row["package"], row["version"], row["status"]]


def _provides(row: dict[str, Any]) -> str:
    return ", ".join(f"{provided['kind']} {provided['name']}" for provided in row["provides"] or ())


def _note(row: dict[str, Any]) -> str:
    return "; ".join([row["error"]] if row["error"] else row["warnings"] or ())


def _fail_if_strict(context: click.Context, manager: PluginManager, rows: list[dict[str, Any]]) -> None:
    if manager.settings.strict and any(row["status"] in ("broken", "conflict") for row in rows):
        context.exit(1)


# --------------------------------------------------------------------------------------------------------------------
# What can be selected


def _listing(name: str, kind: type[Provider], described: str) -> click.Command:
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @no_plugins_option
    @click.pass_context
    def command(context: click.Context, as_json: bool) -> None:
        provided = session(context).plugins.providers(kind)
        if as_json:
            echo_json(
                [
                    {
                        "name": key,
                        "summary": p.record.summary,
                        "package": p.plugin.package,
                        "version": p.plugin.version,
                        "plugin": p.plugin.name,
                        "load": p.record.load,
                    }
                    for key, p in provided.items()
                ]
            )
        elif provided:
            echo_table(
                ["name", "summary", "package"],
                [[key, p.record.summary, p.plugin.label] for key, p in provided.items()],
            )
        else:
            click.echo(f"no {kind.kind}s are installed; rllm-core plugins shows the state of every plugin", err=True)

    return click.command(name, help=described)(command)


engines = _listing("engines", Engine, "List rollout engines.")
parsers = _listing("parsers", Parser, "List parsers.")
workflows = _listing("workflows", Workflow, "List workflows.")

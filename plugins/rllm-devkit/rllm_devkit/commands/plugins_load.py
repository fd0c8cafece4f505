"""``rllm-core plugins load`` and ``plugins show``: import plugins, each in a process of its own, and describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from rllm_core.cli import CORE_COMMANDS, no_plugins_option, session
from rllm_core.cli.completion import installed
from rllm_core.cli.plugins import LISTED, echo_none, fail_if_strict, listed
from rllm_core.cli.tables import echo_json, echo_not_installed, echo_table
from rllm_core.plugins import PluginInfo
from rllm_core.plugins.discovery import installed_plugins
from rllm_core.text import printable_lines

DEADLINE_SECONDS = 30.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "show_all", is_flag=True, help="Include the core's own providers.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE_SECONDS,
    show_default=True,
    help="Timeout for importing one plugin, in seconds.",
)
@no_plugins_option
@click.pass_context
def load(context: click.Context, as_json: bool, show_all: bool, deadline_seconds: float) -> None:
    """Import each plugin in its own process and report problems."""
    manager = session(context).plugins
    rows = _rows(listed(manager, show_all=show_all), deadline_seconds, verbose=session(context).verbose)
    if as_json:
        echo_json(rows)
    elif rows:
        cells = [
            [*(row[key] for key in LISTED), ", ".join(row["hooks"]), _provides(row), row["error"] or _warnings(row)]
            for row in rows
        ]
        echo_table([*LISTED, "hooks", "provides", "note"], cells)
    else:
        echo_none()
    if not as_json:
        echo_not_installed(manager)
    fail_if_strict(context, rows)


@click.command()
@click.argument("name", shell_complete=installed)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def show(context: click.Context, name: str, as_json: bool) -> None:
    """Show all details of one plugin. Imports it in its own process."""
    from rllm_core.plugins.requirements import unmet

    manager = session(context).plugins
    rows = _rows(manager.find(name), DEADLINE_SECONDS, verbose=session(context).verbose)
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
    fail_if_strict(context, rows)


def _rows(infos: Sequence[PluginInfo], deadline_seconds: float, *, verbose: bool) -> list[dict[str, Any]]:
    """Builds one JSON object per plugin, with the keys of ``rllm-core plugins --json``."""
    from rllm_devkit.probe import probe_all

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
    return ", ".join(f"{provided['kind']} {provided['name']}" for provided in row["provides"])


def _warnings(row: dict[str, Any]) -> str:
    return "; ".join(row["warnings"])

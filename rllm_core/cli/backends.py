"""``rllm-core backends``: backends and their capabilities."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click

from rllm_core.cli import no_plugins_option, session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.plugins import PluginManager
from rllm_core.plugins.missing import first_party
from rllm_core.providers import BackendProvider

DEADLINE_SECONDS = 120.0
SLOW_SECONDS = 3.0


@click.command(short_help="List backends and their capabilities.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=DEADLINE_SECONDS,
    show_default=True,
    help="Timeout for importing one backend, in seconds.",
)
@no_plugins_option
@click.pass_context
def backends(context: click.Context, as_json: bool, deadline_seconds: float) -> None:
    """List backends and their capabilities.

    Imports each backend in its own process. Capabilities are those of the default settings; other settings may change
    them.
    """
    rows = backend_rows(session(context).plugins, deadline_seconds)
    if as_json:
        echo_json(rows)
        return
    if not rows:
        click.echo("no backends are installed; run rllm-core plugins to see the status of every plugin", err=True)
        return
    echo_table(
        ["name", "status", "summary", "package", "note"],
        [
            [row["name"], row["status"], row["summary"], f"{row['package']} {row['version']}", row["error"] or ""]
            for row in rows
        ],
    )
    able = [row for row in rows if row["capabilities"] is not None]
    if able:
        click.echo()
        header = ["by default", "", *(row["name"] for row in able)]
        echo_table(header, list(matrix([row["capabilities"] for row in able])))


def backend_rows(plugins: PluginManager, deadline_seconds: float) -> list[dict[str, Any]]:
    """Builds one JSON object per backend, by name; if ``capabilities`` is null, ``error`` has the reason."""
    from rllm_core.assembly.support import Support
    from rllm_core.backend import Capabilities
    from rllm_core.plugins.probe import ask_backends

    provided = plugins.providers(BackendProvider)
    waiting = f"still importing {', '.join(provided)} (torch takes a while)"
    timer = threading.Timer(SLOW_SECONDS, click.echo, (waiting,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        answers = ask_backends(list(provided.values()), deadline_seconds)
    finally:
        timer.cancel()
    rows = list(_unusable(plugins))
    for (name, one), asked in zip(provided.items(), answers, strict=True):
        capabilities = None
        if asked.declared is not None:
            declared: dict[str, Any] = {
                key: frozenset(v) if isinstance(v, list) else v for key, v in asked.declared.items()
            }
            capabilities = Support.of(Capabilities(**declared), plugins).to_json()
        rows.append(
            {
                "name": name,
                "status": asked.status,
                "capabilities": capabilities,
                "error": asked.error,
                "summary": one.record.summary,
                "package": one.plugin.package,
                "version": one.plugin.version,
                "plugin": one.plugin.name,
                "load": one.record.load,
            }
        )
    return sorted(rows, key=lambda row: (row["name"], row["package"]))


def matrix(capabilities: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields rows of capability, value and yes or no per backend: one per value of any backend, and one per flag."""
    for what in capabilities[0]:
        label = what.replace("_", " ")
        if isinstance(capabilities[0][what], bool):
            yield [label, "", *("yes" if one[what] else "no" for one in capabilities)]
            continue
        for which in sorted({name for one in capabilities for name in one[what]}):
            yield [label, which, *("yes" if which in one[what] else "no" for one in capabilities)]


def _unusable(plugins: PluginManager) -> Iterator[dict[str, Any]]:
    """Yields rows for first-party backends whose plugin could not be registered."""
    for info in plugins.plugins():
        for (kind, name), package in first_party().items():
            if kind is BackendProvider and package == info.package and info.status in ("broken", "conflict"):
                yield {
                    "name": name,
                    "status": info.status,
                    "capabilities": None,
                    "error": info.error,
                    "summary": "",
                    "package": info.package,
                    "version": info.version,
                    "plugin": info.name,
                    "load": None,
                }

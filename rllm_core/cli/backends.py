"""``rllm-core backends``: backends and their capabilities, each queried in a child process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rllm_core.cli import CORE_COMMANDS, no_plugins_option, session
from rllm_core.cli.tables import echo_json, echo_not_installed, echo_table, provider_row
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.missing import first_party
from rllm_core.plugins.probe import in_children, only, report, run_child
from rllm_core.providers import BackendProvider

if TYPE_CHECKING:
    from rllm_core.backend import BackendProtocol, Capabilities

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
    plugins = session(context).plugins
    rows = backend_rows(plugins, deadline_seconds)
    if as_json:
        echo_json(rows)
        return
    if not rows:
        click.echo("no backends are installed; run rllm-core plugins to see the status of every plugin", err=True)
        echo_not_installed(plugins, BackendProvider)
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
    echo_not_installed(plugins, BackendProvider)


def backend_rows(plugins: PluginManager, deadline_seconds: float) -> list[dict[str, Any]]:
    """Builds one JSON object per backend, by name; if ``capabilities`` is null, ``error`` has the reason."""
    from rllm_core.assembly.support import Support
    from rllm_core.backend import Capabilities

    provided = plugins.providers(BackendProvider)
    waiting = f"still importing {', '.join(provided)} (torch takes a while)"
    timer = threading.Timer(SLOW_SECONDS, click.echo, (waiting,), {"err": True})
    timer.daemon = True
    timer.start()

    def ask(one: Provided[BackendProvider], running: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
        arguments = [one.plugin.package, one.plugin.name, one.plugin.value, one.record.name]
        found = run_child(arguments, deadline_seconds, running, module=__name__)
        return _broken(found) if isinstance(found, str) else found

    try:
        answers = in_children(ask, list(provided.values()))
    finally:
        timer.cancel()
    rows = list(_unusable(plugins))
    for (name, one), found in zip(provided.items(), answers, strict=True):
        if found["capabilities"] is not None:
            declared: dict[str, Any] = {
                key: frozenset(v) if isinstance(v, list) else v for key, v in found["capabilities"].items()
            }
            found["capabilities"] = Support.of(Capabilities(**declared), plugins).to_json()
        rows.append(provider_row(name, one, **found))
    return sorted(rows, key=lambda row: (row["name"], row["package"]))


def default_capabilities(provided: Provided[BackendProvider], plugins: PluginManager) -> Capabilities:
    """Returns a backend's capabilities with its default settings, which the run file may change.

    Raises:
        ConfigError: If the backend cannot declare them without settings.
        PluginError: If the backend is broken.
    """
    from rllm_core.backend import Capabilities
    from rllm_core.config import RunConfig
    from rllm_core.run_file import validated

    record = provided.record
    found: type[BackendProtocol[Any]] = plugins.load(provided)
    sections = {}
    if record.config is not None:
        sections[record.name] = validated(plugins.load(provided, record.config), {}, record.name, ())
    with provided.at_work("its capabilities()", found):
        declared = found.capabilities(RunConfig(workflow="any", backend=record.name, plugins=sections))
    return provided.checked("its capabilities()", declared, Capabilities)


def matrix(capabilities: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yields rows of capability, value and yes or no per backend: one per value of any backend, and one per flag."""
    for what in capabilities[0]:
        label = what.replace("_", " ")
        if isinstance(capabilities[0][what], bool):
            yield [label, "", *("yes" if one[what] else "no" for one in capabilities)]
            continue
        for which in sorted({name for one in capabilities for name in one[what]}):
            yield [label, which, *("yes" if which in one[what] else "no" for one in capabilities)]


def _broken(error: str) -> dict[str, Any]:
    return {"status": "broken", "capabilities": None, "error": error}


def _unusable(plugins: PluginManager) -> Iterator[dict[str, Any]]:
    """Yields rows for first-party backends whose plugin could not be registered."""
    names = [(name, package) for (kind, name), package in first_party().items() if kind is BackendProvider]
    unusable = [info for info in plugins.plugins() if info.status in ("broken", "conflict")]
    for info in unusable:
        for name in (name for name, package in names if package == info.package):
            row = {"name": name, "status": info.status, "capabilities": None, "error": info.error, "summary": ""}
            about = {"package": info.package, "version": info.version, "plugin": info.name, "load": None}
            yield row | about


def _declared(package: str, plugin: str, value: str, name: str) -> dict[str, Any]:
    """Runs in a child process: loads the class of a backend and reads its capabilities."""
    manager = only(package, plugin, value, CORE_COMMANDS)
    try:
        capabilities = default_capabilities(manager.select(BackendProvider, name), manager)
    except ConfigError as error:  # not broken: its capabilities depend on required settings
        return _broken(str(error)) | {"status": "loaded"}
    except PluginError as error:
        return _broken(str(error))
    declared = {key: sorted(v) if isinstance(v, frozenset) else v for key, v in asdict(capabilities).items()}
    return {"status": "loaded", "capabilities": declared, "error": None}


if __name__ == "__main__":
    path, *asked = sys.argv[1:]
    report(path, lambda: _declared(*asked))

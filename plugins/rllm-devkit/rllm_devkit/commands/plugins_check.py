"""``rllm-core plugins check``: checks an installed plugin against its contracts."""

from __future__ import annotations

from dataclasses import replace

import click

from rllm_core.cli import no_plugins_option, session
from rllm_core.cli.completion import installed
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import PluginError
from rllm_core.plugins import CORE_PLUGIN, PluginInfo

CHECK_DEADLINE_SECONDS = 600.0


@click.command()
@click.argument("name", shell_complete=installed)
@click.option("-o", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Set a key; repeatable.")
@click.option("--model", default="", help="Model folder or Hugging Face model ID, for providers that need one.")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=CHECK_DEADLINE_SECONDS,
    show_default=True,
    help="Timeout for the checks of one provider, in seconds.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for packaging warnings, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@no_plugins_option
@click.pass_context
def check(
    context: click.Context,
    name: str,
    overrides: tuple[str, ...],
    model: str,
    deadline_seconds: float,
    strict: bool,
    as_json: bool,
) -> None:
    """Check a plugin and its providers against their contracts, and check its packaging.

    Contract: imports the plugin, builds each provider with default settings and runs the checks of its kind, each in
    its own process. Exits with 1 if one fails.

    Packaging: checks the description, README, license, versions, and text left over from the template. Findings are
    warnings; they change the exit code only with --strict.
    """
    from rllm_devkit.checks.packaging import WARNING
    from rllm_devkit.checks.plugin import Wishes, check_plugin

    manager = session(context).plugins
    [plugin, *others] = map(_not_loaded, manager.find(name))
    if others:
        conflict = next((info.error for info in (plugin, *others) if info.status == "conflict"), None)
        raise PluginError(conflict or f"several plugins are named {name!r}; choose one as DISTRIBUTION/NAME")
    beside = [
        info
        for info in map(_not_loaded, manager.plugins())
        if info.status == "available" and CORE_PLUGIN != info.name != plugin.name
    ]
    groups = check_plugin(plugin, beside, Wishes(overrides, model, deadline_seconds))
    outcomes = [result.outcome for group in groups for result in group.checks]
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
    warnings = outcomes.count(WARNING)
    contract, packaging = "failed" if counts["failed"] else "passed", "warnings" if warnings else "passed"
    has_failed = bool(counts["failed"] or (strict and warnings))
    if as_json:
        about = {"plugin": plugin.name, "package": plugin.package, "version": plugin.version, "value": plugin.value}
        verdicts = {"outcome": "failed" if has_failed else "passed", "contract": contract, "packaging": packaging}
        numbers = {**counts, "warnings": warnings}
        echo_json({**about, **verdicts, **numbers, "groups": [group.to_json() for group in groups]})
    else:
        for group in groups:
            rows = [[result.name, result.outcome, result.detail] for result in group.checks]
            echo_table([f"{group.kind} {group.name}", "result", "seen"], rows)
            click.echo()
        counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        noted = f"{warnings} warning{'' if warnings == 1 else 's'}" if warnings else "passed"
        click.echo(f"{plugin.label}, plugin {plugin.name!r}: contract {contract} ({counted}); packaging: {noted}")
    context.exit(1 if has_failed else 0)


def _not_loaded(info: PluginInfo) -> PluginInfo:
    """Describes a plugin as a new process would find it; this process has loaded the devkit to run the command."""
    return replace(info, status="available") if info.status == "loaded" else info

"""``rllm-core environments``: lists, describes and audits the environments of workflows that have variants."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import ConfigError
from rllm_core.plugins import Provided
from rllm_core.providers import WorkflowProvider, resolve
from rllm_core.text import printable
from rllm_environments.catalog import AuditFiles, Description, unknown

WIDTH = 80
REASON_CHARACTERS = 40

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("environments", short_help="List, describe and audit environments from other packages.")
def environments() -> None:
    """List, describe and audit environments from other packages.

    An ecosystem is a workflow with many environments, such as reasoning_gym. Train on one with
    rllm-core train ECOSYSTEM/NAME.
    """


@environments.command("list")
@click.argument("ecosystem", required=False, metavar="[ECOSYSTEM]")
@as_json_option
@click.pass_context
def list_environments(context: click.Context, ecosystem: str | None, as_json: bool) -> None:
    """List the environments of an ecosystem, or all ecosystems.

    STATE is "played" if an audit passed and whole rollouts were played, "audited" if only the audit passed, "listed" if
    neither was done, and otherwise "refused".
    """
    found = _described(context, ecosystem)
    if as_json:
        echo_json(found)
    elif ecosystem is None:
        rows = [[name, *_counts(described)] for name, described in found.items()]
        echo_table(("ecosystem", "listed", "played", "audited", "refused"), rows)
    else:
        rows = [
            [each["name"], state_of(each), str(each["turns"]), str(each["players"]), _needs_or_reason(each)]
            for each in found[ecosystem]
        ]
        echo_table(("name", "state", "turns", "players", "needs, or why refused"), rows)


@environments.command("show")
@click.argument("environment", metavar="ECOSYSTEM/NAME")
@as_json_option
@click.pass_context
def show_environment(context: click.Context, environment: str, as_json: bool) -> None:
    """Describe an environment, and what its audit found."""
    ecosystem, name = _split(environment)
    if name is None:
        raise ConfigError(f"environment {environment!r:.80} has no name; write ECOSYSTEM/NAME")
    [about] = _described(context, ecosystem, name)[ecosystem]
    if as_json:
        echo_json(about)
        return
    click.echo(f"{ecosystem}/{printable(name)}: {state_of(about)}")
    for key, value in about.items():
        if key not in ("name", "refused", "notes", "audited", "played"):
            _echo_line(key.replace("_", " "), _text(value))
    for key, text in [("refused", about["refused"]), *(("note", note) for note in about["notes"])]:
        if text:
            _echo_line(key, text)


@environments.command("audit")
@click.argument("environment", metavar="ECOSYSTEM[/NAME]")
@click.option("--write", is_flag=True, help="Write the audit file of the installed version.")
@as_json_option
@click.pass_context
def audit_environments(context: click.Context, environment: str, write: bool, as_json: bool) -> None:
    """Audit an environment, or all of an ecosystem, which takes minutes.

    Exits with 1 if a finding differs from the committed audit, where one is committed.
    """
    ecosystem, name = _split(environment)
    [provided] = _ecosystems(context, ecosystem).values()
    workflow: Any = session(context).plugins.load(provided)
    if not hasattr(workflow, "audits"):
        raise ConfigError(f"workflow {ecosystem!r} has no audit")
    files: AuditFiles | None = getattr(workflow, "audit_files", None)
    if write and name is not None:
        raise ConfigError("--write needs the audit of a whole ecosystem; leave /NAME out")
    if write and files is None:
        raise ConfigError(
            f"the audit of {ecosystem!r} depends on the installed packages, so it is not stored; leave out --write"
        )
    committed = None if files is None else files.read().environments
    made: dict[str, Any] = {}
    for each, findings in resolve(workflow.audits)([] if name is None else [name]):
        made[each] = findings
        if not as_json:
            note = ", not as committed" if committed is not None and committed.get(each) != findings else ""
            click.echo(f"{printable(each)}: {state_of(findings)}{note}")
    changed = [] if committed is None else [each for each in made if committed.get(each) != made[each]]
    if write and files is not None:
        click.echo(f"wrote {files.write(made)}", err=as_json)
    if as_json:
        echo_json({"environments": made, "changed": changed})
    context.exit(1 if changed and not write else 0)


def state_of(described: Mapping[str, Any]) -> str:
    """Returns the state of an environment in one word."""
    if described.get("refused"):
        return "refused"
    if described.get("played"):
        return "played"
    return "audited" if described.get("audited") else "listed"


def _ecosystems(context: click.Context, ecosystem: str | None = None) -> dict[str, Provided[WorkflowProvider]]:
    """Returns the workflows that have variants, or only the requested one."""
    found = session(context).plugins.providers(WorkflowProvider)
    having = {name: provided for name, provided in found.items() if provided.record.variants is not None}
    if ecosystem is None:
        return having
    if ecosystem not in having:
        raise ConfigError(f"ecosystem {ecosystem!r:.80} does not exist; choose one of: {', '.join(having) or 'none'}")
    return {ecosystem: having[ecosystem]}


def _described(
    context: click.Context, ecosystem: str | None, name: str | None = None
) -> dict[str, list[Mapping[str, Any]]]:
    """Returns descriptions of environments, by ecosystem."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each, provided in _ecosystems(context, ecosystem).items():
        plugins = session(context).plugins
        names = list(plugins.load(provided, provided.record.variants)())
        if name is not None and name not in names:
            raise unknown("environment", name, names)
        workflow: Any = plugins.load(provided)
        chosen = names if name is None else [name]
        found[each] = [{"name": variant, **_UNDESCRIBED, **_of(workflow, variant)} for variant in chosen]
    return found


def _of(workflow: Any, variant: str) -> Mapping[str, Any]:
    described: Mapping[str, Any] = workflow.describe(variant) if hasattr(workflow, "describe") else {}
    return described


_UNDESCRIBED: dict[str, Any] = {key: value for key, value in asdict(Description(name="")).items() if key != "name"}
"""Description of an environment whose workflow has none."""


def _counts(described: Sequence[Mapping[str, Any]]) -> list[str]:
    states = Counter(map(state_of, described))
    return [str(len(described)), *(str(states[state]) for state in ("played", "audited", "refused"))]


def _needs_or_reason(described: Mapping[str, Any]) -> str:
    """Returns a shortened reason why an environment is refused, or else its requirements."""
    text = described["refused"] or ", ".join(described["needs"])
    return textwrap.shorten(printable(text), REASON_CHARACTERS, placeholder=" ...")


def _split(environment: str) -> tuple[str, str | None]:
    ecosystem, _, name = environment.partition("/")
    return ecosystem, name or None


def _echo_line(key: str, value: str) -> None:
    click.echo(textwrap.fill(f"{key}: {printable(value)}", WIDTH, initial_indent="  ", subsequent_indent="    "))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)

"""``rllm-core environments``: lists, describes and audits the environments of workflows that have variants."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rllm_core.cli import session
from rllm_core.cli.tables import echo_json, echo_table
from rllm_core.errors import ConfigError
from rllm_core.text import printable

if TYPE_CHECKING:
    from rllm_core.workflow import Workflow

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
WIDTH = 80

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("environments", short_help="List, describe and audit the environments of other packages.")
def environments() -> None:
    """List, describe and audit the environments of other packages.

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
    found = _found(context, ecosystem)
    if as_json:
        echo_json({name: [dict(each) for each in described] for name, (_, described) in found.items()})
    elif ecosystem is None:
        echo_table(("ECOSYSTEM", "LISTED", "PLAYED", "REFUSED"), [_counts(name, of) for name, (_, of) in found.items()])
    else:
        [(_, described)] = found.values()
        rows = [(each["name"], state_of(each), str(each["turns"]), str(each["players"])) for each in described]
        echo_table(("NAME", "STATE", "TURNS", "PLAYERS"), rows)


@environments.command("show")
@click.argument("environment", metavar="ECOSYSTEM/NAME")
@as_json_option
@click.pass_context
def show_environment(context: click.Context, environment: str, as_json: bool) -> None:
    """Describe an environment, and what its audit found."""
    ecosystem, name = _split(environment)
    if name is None:
        raise ConfigError(f"environment {environment!r:.80} has no name; write ECOSYSTEM/NAME")
    [(_, described)] = _found(context, ecosystem, name).values()
    [about] = described
    if as_json:
        echo_json(about)
        return
    click.echo(f"{ecosystem}/{printable(name)}: {state_of(about)}")
    for key, value in about.items():
        if key not in ("name", "refused", "notes", "audited", "played"):
            click.echo(_line(key.replace("_", " "), _text(value)))
    for line in ([about["refused"]] if about["refused"] else []):
        click.echo(_line("refused", str(line)))
    for note in about["notes"]:
        click.echo(_line("note", str(note)))


@environments.command("audit")
@click.argument("environment", metavar="ECOSYSTEM[/NAME]")
@click.option("--write", is_flag=True, help="Write the audit file of the installed version.")
@as_json_option
@click.pass_context
def audit_environments(context: click.Context, environment: str, write: bool, as_json: bool) -> None:
    """Audit an environment, or all of an ecosystem, which takes minutes.

    Exits with 1 if a finding differs from the committed audit.
    """
    ecosystem, name = _split(environment)
    [workflow] = _workflows(context, ecosystem).values()
    if not hasattr(workflow, "audit"):
        raise ConfigError(f"workflow {ecosystem!r} has no audit; those that do: {_names(context, 'audit')}")
    if write and name is not None:
        raise ConfigError("--write needs the audit of a whole ecosystem; leave /NAME out")
    committed = _committed(workflow)
    made: dict[str, Any] = {}
    changed: list[str] = []
    for each, findings in workflow.audit([] if name is None else [name]):
        made[each] = findings
        is_same = committed.get(each) == findings
        changed += [] if is_same else [each]
        if not as_json:
            click.echo(f"{printable(each)}: {state_of(findings)}{'' if is_same else ', not as committed'}")
    if write:
        path = workflow.write_audit(made)  # type: ignore[attr-defined]
        click.echo(f"wrote {path}", err=as_json)
        changed = []
    if as_json:
        echo_json({"environments": made, "changed": changed})
    context.exit(1 if changed else 0)


def state_of(described: Mapping[str, Any]) -> str:
    """Returns the state of an environment in one word."""
    if described.get("refused"):
        return "refused"
    if described.get("played"):
        return "played"
    return "audited" if described.get("audited") else "listed"


def _found(
    context: click.Context, ecosystem: str | None, only: str | None = None
) -> dict[str, tuple[type[Workflow], list[Mapping[str, Any]]]]:
    """Returns the descriptions of environments, by ecosystem."""
    found = {}
    for name, workflow in _workflows(context, ecosystem).items():
        variants = _variants(context, name)
        if only is not None:
            if only not in variants:
                from rllm_environments.catalog import unknown

                raise unknown("environment", only, variants)
            variants = [only]
        found[name] = (workflow, [workflow.describe(variant) for variant in variants])  # type: ignore[attr-defined]
    return found

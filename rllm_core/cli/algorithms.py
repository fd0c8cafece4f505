"""``rllm-core algorithms``: estimators, losses, corrections, group scorers and task samplers for the run file."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import click

from rllm_core.cli import no_plugins_option, session
from rllm_core.cli.tables import echo_json, echo_table, provider_row
from rllm_core.errors import PluginError
from rllm_core.plugins import PluginManager
from rllm_core.providers import PolicyLossProvider

if TYPE_CHECKING:
    from pydantic import BaseModel


@click.command(short_help="List estimators, losses, corrections, group scorers and task samplers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@no_plugins_option
@click.pass_context
def algorithms(context: click.Context, as_json: bool) -> None:
    """List advantage estimators, losses, off-policy corrections, group scorers and task samplers, with their options.

    Imports them to read their options; losses import torch.
    """
    rows = piece_rows(session(context).plugins)
    if as_json:
        echo_json(rows)
        return
    for number, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        if number:
            click.echo()
        lines = [
            [
                row["name"],
                row["error"] or row["summary"],
                ", ".join(f"{option['name']}={_shown(option)}" for option in row["options"] or ()),
                f"{row['package']} {row['version']}",
            ]
            for row in rows
            if row["kind"] == kind
        ]
        echo_table([kind, "summary", "options", "package"], lines)


def piece_rows(plugins: PluginManager) -> list[dict[str, Any]]:
    """Builds one JSON object per component; if ``options`` is null, ``error`` has the reason."""
    from rllm_core.assembly.components import piece_class
    from rllm_core.plugins.sections import WITH_OPTIONS

    has_torch = importlib.util.find_spec("torch") is not None
    rows = []
    for kind in WITH_OPTIONS:
        for name, provided in plugins.providers(kind).items():
            status, options, error = "loaded", None, None
            if kind is PolicyLossProvider and not has_torch:
                status, error = "available", "losses need torch, which is not installed"
            else:
                try:
                    options = _option_rows(piece_class(plugins, provided).options_model)
                except PluginError as problem:
                    status, error = "broken", str(problem)
            found = {"options": options, "status": status, "error": error}
            rows.append({"kind": kind.kind, **provider_row(name, provided, **found)})
    return rows


def _option_rows(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Returns the name, default (null if required or unset) and description of every option, as JSON."""
    from pydantic_core import to_jsonable_python

    return [
        {
            "name": name,
            "required": field.is_required(),
            "default": to_jsonable_python(
                None if field.is_required() else field.get_default(call_default_factory=True)
            ),
            "description": field.description or "",
        }
        for name, field in model.model_fields.items()
    ]


def _shown(option: dict[str, Any]) -> str:
    return "required" if option["required"] else "unset" if option["default"] is None else json.dumps(option["default"])

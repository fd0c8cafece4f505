"""Prints rows as JSON, as plain columns, or as a rich table on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.missing import not_installed_distributions
from rllm_core.providers import Provider
from rllm_core.text import printable_lines

MIN_COLUMN_CHARACTERS = 16


def printing_apart(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Context in which plugins and workflows print to stderr if the command prints JSON, so stdout has only JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def echo_json(value: Any) -> None:
    """Prints one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def provider_row(name: str, provided: Provided[Any], **found: Any) -> dict[str, Any]:
    """Builds the JSON object of a provider: its name, the fields in ``found``, and the plugin it comes from."""
    plugin = provided.plugin
    about = {"package": plugin.package, "version": plugin.version, "plugin": plugin.name, "load": provided.record.load}
    return {"name": name, "summary": provided.record.summary, **found, **about}


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns; on a terminal, with rich, which is imported only then."""
    clean = [[printable_lines(cell).replace("\n", " ") for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if _is_narrow(headers, clean, console.width):
            _echo_records(headers, clean, console.width)
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        for number, header in enumerate(headers):
            table.add_column(header, overflow="fold", no_wrap=number == 0)  # names must stay copyable
        for row in clean:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    lines = [list(headers), *clean]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def echo_not_installed(plugins: PluginManager, kind: type[Provider] | None = None) -> None:
    """Prints our own plugins that are not installed, and how to install them.

    With ``kind``, only those with such a provider.
    """
    missing = not_installed_distributions({info.package for info in plugins.plugins()}, kind)
    if missing:
        click.echo("\nnot installed:")
    for distribution, provided in missing.items():
        names = ", ".join(name if kind else f"{owner.kind} {name}" for owner, name in provided)
        line = f"pip install {distribution}  # {names}"
        click.echo(textwrap.fill(line, 80, initial_indent="  ", subsequent_indent="    # "))


def _is_narrow(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether the table would break words into unreadably short pieces."""
    columns = [max(len(cells[column]) for cells in (headers, *rows)) for column in range(len(headers))]
    first, *others = columns
    return first + sum(2 + min(column, MIN_COLUMN_CHARACTERS) for column in others) > width


def _echo_records(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Prints each row as a block: its first cell, then a line for each other cell that is not empty."""
    for first, *cells in rows:
        click.echo(first)
        for header, cell in zip(headers[1:], cells, strict=True):
            if cell.strip():
                click.echo(
                    textwrap.fill(f"{header}: {cell}", max(width, 20), initial_indent="  ", subsequent_indent="    ")
                )

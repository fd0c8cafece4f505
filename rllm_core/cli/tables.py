"""Print rows: as JSON, as plain columns, or as a rich table where a person is looking."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def echo_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; on a terminal with rich, which is imported only there."""
    clean = [[_printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for number, header in enumerate(headers):
            table.add_column(header, overflow="fold", no_wrap=number == 0)  # what is typed again is never cut
        for row in clean:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    lines = [list(headers), *clean]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _printable(text: str) -> str:
    """Metadata of packages is foreign text: no control sequence of it may reach the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)

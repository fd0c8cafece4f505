"""Converts run files and tables to the form that tracker libraries accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.tracker import Cell

Scalar = str | int | float | bool
MARKUP = frozenset("|<>&`*_[]()!#~\\")


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Flattens nested tables, with the same keys as ``-o``: ``section.key``. Lists become text."""
    flattened: dict[str, Scalar] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, str | int | float) else str(value)
    return flattened


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Writes a table in Markdown; no cell can end its row or start markup or a tag."""
    lines = [columns, ["---"] * len(columns), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    if not isinstance(cell, str):
        return "" if cell is None else f"{cell:g}"
    text = "".join(f"&#{ord(one)};" if one in MARKUP else one for one in cell)
    return " ".join(text.split())

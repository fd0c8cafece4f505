"""Conversion of run files to the form that tracker libraries accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Scalar = str | int | float | bool


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Flattens nested tables, with the same keys as ``-o``: ``section.key``. Lists become text."""
    flattened: dict[str, Scalar] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value if isinstance(value, str | int | float) else str(value)
    return flattened

"""Export functions that fail, for a backend's record."""

from __future__ import annotations

from pathlib import Path


def write_nothing(checkpoint: Path, config: object, target: Path) -> None:
    """Writes no model."""
    (target / "half.txt").write_text("")


def raise_an_error(checkpoint: Path, config: object, target: Path) -> None:
    """Fails with an error that is no `UserError`."""
    raise ZeroDivisionError("no weights")

"""Which run of a library belongs to a run folder, so that a resumed run goes on in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def files_of(run_dir: str) -> Path:
    """The folder of all trackers in a run folder."""
    folder = Path(run_dir) / "trackers"
    folder.mkdir(exist_ok=True)
    return folder


def identity(run_dir: str, tracker: str, new: Callable[[], str]) -> tuple[str, bool]:
    """The id under which a library knows the run of this folder, kept in ``trackers/NAME.json``.

    Args:
        run_dir: The run folder.
        tracker: Name of the tracker.
        new: Makes the id where the folder has none yet.

    Returns:
        The id, and whether it was there before.
    """
    path = files_of(run_dir) / f"{tracker}.json"
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"]), True
    made = new()
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"id": made}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return made, False

"""Maps a run folder to its run in a tracker's library, so that a resumed run continues there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def files_of(run_dir: str) -> Path:
    """Creates the folder for tracker files in a run folder, and returns it."""
    folder = Path(run_dir) / "trackers"
    folder.mkdir(exist_ok=True)
    return folder


def identity(run_dir: str, tracker: str, new: Callable[[], str]) -> tuple[str, bool]:
    """Returns the library's run id for this run folder, stored in ``trackers/NAME.json``.

    Args:
        run_dir: Run folder.
        tracker: Name of the tracker.
        new: Function that creates the id if the folder has none yet.

    Returns:
        The id, and whether it already existed.
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

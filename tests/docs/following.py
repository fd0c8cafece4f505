"""Runs the commands of a page as a reader would."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


def followed(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[str, Path]:
    """Runs a command; returns its standard output and the reader's folder afterwards."""
    done = subprocess.run(
        ["bash", "-c", f"{command} && pwd"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
    *printed, place = done.stdout.splitlines()
    return "\n".join(printed), Path(place)

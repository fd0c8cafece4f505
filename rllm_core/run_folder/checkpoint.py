"""Checkpoint folders; a checkpoint is complete once its manifest exists, which is written last."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from rllm_core.errors import RunError
from rllm_core.run_folder.journal import write_whole

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


def step_folder(root: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after ``step`` optimizer steps."""
    return root / f"step-{step:06d}"


def begin(root: Path, step: int) -> Path:
    """Creates an empty checkpoint folder, removing an incomplete one left by a crash.

    Raises:
        RunError: If a complete checkpoint of this step exists.
    """
    folder = step_folder(root, step)
    if (folder / MANIFEST).exists():
        raise RunError(f"checkpoint {folder} exists and is complete")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, state: dict[str, Any]) -> None:
    """Syncs everything in ``folder`` to disk, then writes the manifest that completes the checkpoint.

    Args:
        folder: Folder from `begin`, with its files.
        state: JSON state; the manifest adds the format number, and size and sha256 of every file.
    """
    paths, files = [path for path in sorted(folder.rglob("*")) if path.is_file()], {}
    for path in paths:
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _fsync(path)
    for directory in sorted({path.parent for path in paths} | {folder}, reverse=True):
        _fsync(directory)
    manifest = {"format": FORMAT, **state, "files": files}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n")
    _fsync(folder)
    _fsync(folder.parent)


def complete(root: Path) -> list[Path]:
    """Lists the folders of complete checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def read(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint and checks every file against it.

    Raises:
        RunError: If the manifest is missing or has another format, or a file is missing or differs.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if manifest.get("format") != FORMAT:
        raise RunError(f"{path} has format {manifest.get('format')!r}, but this version of rllm-core reads {FORMAT}")
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise RunError(f"checkpoint {folder} is damaged: {name} is missing")
        if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
            raise RunError(f"checkpoint {folder} is damaged: {name} does not match its manifest")
    return manifest


def check_backend_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Checks that the manifest of a checkpoint covers every file of the backend: torch may unpickle any of them.

    Raises:
        RunError: If a file is missing from the manifest.
    """
    for path in sorted((folder / "backend").rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in manifest["files"]:
            raise RunError(f"checkpoint {folder} is damaged: {name} is not in its manifest")


def prune(root: Path, keep: int) -> list[Path]:
    """Removes all but the latest ``keep`` complete checkpoints, and incomplete folders older than those.

    Removes the manifest first, so a crash leaves an incomplete folder instead of a damaged checkpoint.
    """
    kept = complete(root)[-max(keep, 1) :]
    if not kept:
        return []
    removed = []
    for path in sorted(root.iterdir()):
        if _NAME.fullmatch(path.name) and path.name < kept[0].name and path not in kept:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

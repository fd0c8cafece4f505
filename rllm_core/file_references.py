"""References to files of the user, which can stand in place of a provider's name: ``./env.py:MyEnv``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"(?P<path>(~|\.{1,2})?/.*\.py)(:(?P<name>[A-Za-z_]\w*))?")


def is_file_reference(name: str) -> bool:
    """Whether ``name`` is a file instead of the name of a provider: ``./env.py``, or ``./env.py:MyEnv``.

    The path starts with ``/``, ``./``, ``../`` or ``~/``.
    """
    return _REFERENCE.fullmatch(name) is not None


def file_reference(reference: str) -> tuple[Path, str | None]:
    """Returns the path and the name in a reference to a file.

    Raises:
        ValueError: If it is no such reference.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ValueError(f"{reference!r} does not have the form ./FILE.py:NAME")
    return Path(found["path"]).expanduser(), found["name"]


def section_name(name: str) -> str:
    """Returns the name of a provider's section: for a file, its name without ``.py``; otherwise ``name`` itself."""
    if not is_file_reference(name):
        return name
    stem = re.sub(r"[^a-z0-9_.-]", "-", file_reference(name)[0].stem.lower())
    return stem if stem[0].isalnum() else f"file{stem}"


def with_absolute_files(value: Any, folder: Path) -> Any:
    """Returns tables in which references to files are absolute.

    Args:
        value: Tables, lists and scalars.
        folder: Folder to which relative references are relative.
    """
    if isinstance(value, Mapping):
        return {key: with_absolute_files(content, folder) for key, content in value.items()}
    if isinstance(value, list):
        return [with_absolute_files(content, folder) for content in value]
    if isinstance(value, str) and is_file_reference(value):
        path, name = file_reference(value)
        return f"{(folder / path).resolve()}" + (f":{name}" if name else "")
    return value

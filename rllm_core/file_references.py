"""References to code of the user, which can stand in place of a provider's name.

``./env.py:MyEnv`` is in a file, ``python:MyEnv`` in the Python program that trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REFERENCE = re.compile(r"(?P<path>(~|\.{1,2})?/.*\.py)(:(?P<name>[A-Za-z_]\w*))?")

CLASS_PREFIX = "python:"


def is_class_reference(name: str) -> bool:
    """Whether ``name`` is a class of a Python program instead of the name of a provider: ``python:MyEnv``."""
    return name.startswith(CLASS_PREFIX)


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
    """Returns the name of a provider's section.

    For a file, it is the file's name without ``.py``; for a class of a program, that of the class; otherwise ``name``.
    """
    if is_class_reference(name):
        own = name.removeprefix(CLASS_PREFIX)
    elif is_file_reference(name):
        own = file_reference(name)[0].stem
    else:
        return name
    section = re.sub(r"[^a-z0-9_.-]", "-", own.lower())
    return section if section[:1].isalnum() else f"file{section}"


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

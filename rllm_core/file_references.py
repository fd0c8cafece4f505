"""References to the user's own code, which can replace a provider's name.

``./env.py:MyEnv`` refers to a file, ``python:MyEnv`` to a class in the Python program that trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError

_SCRIPT = re.compile(r"[\w./-]+\.py")  # an argument of a program, which looks for it in the working directory
_REFERENCE = re.compile(r"(?P<path>(~|\.{1,2})?/.*\.py)(:(?P<name>[A-Za-z_]\w*))?")

CLASS_PREFIX = "python:"


def is_class_reference(name: str) -> bool:
    """Whether ``name`` refers to a class of a Python program, as in ``python:MyEnv``, and not to a provider."""
    return name.startswith(CLASS_PREFIX)


def is_file_reference(name: str) -> bool:
    """Whether ``name`` refers to a file, as in ``./env.py`` or ``./env.py:MyEnv``, and not to a provider.

    The path starts with ``/``, ``./``, ``../`` or ``~/``.
    """
    return _REFERENCE.fullmatch(name) is not None


def file_reference(reference: str) -> tuple[Path, str | None]:
    """Returns the path and the name in a reference to a file.

    Raises:
        ValueError: If ``reference`` is not of this form.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ValueError(f"{reference!r} does not have the form ./FILE.py:NAME")
    return Path(found["path"]).expanduser(), found["name"]


def section_name(name: str) -> str:
    """Returns the name of a provider's section.

    For a file, this is the file's name without ``.py``; for a class of a program, the class's name; otherwise ``name``.
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
    """Returns tables in which references to files are absolute. Relative references start from ``folder``.

    Raises:
        ConfigError: If a text has the character NUL, which no path or argument of a program can have.
    """
    if isinstance(value, Mapping):
        return {key: with_absolute_files(content, folder) for key, content in value.items()}
    if isinstance(value, list):
        return [with_absolute_files(content, folder) for content in value]
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{value!r}: no value of a run file can have the character NUL; remove it")
    if isinstance(value, str) and is_file_reference(value):
        path, name = file_reference(value)
        return f"{(folder / path).resolve()}" + (f":{name}" if name else "")
    return value


def referenced_files(value: Any) -> Iterator[str]:
    """Yields the paths of all Python files that tables name: references, and paths from the working directory."""
    if isinstance(value, Mapping | list):
        for content in value.values() if isinstance(value, Mapping) else value:
            yield from referenced_files(content)
    elif isinstance(value, str) and is_file_reference(value):
        yield str(file_reference(value)[0])
    elif isinstance(value, str) and _SCRIPT.fullmatch(value):
        yield str(Path(value).absolute())

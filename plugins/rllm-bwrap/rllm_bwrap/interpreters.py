"""The files that isolated code may read: an interpreter, its packages, and the system's libraries."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60.0
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/nix/store")

ASK = """
import json, os, sys
own = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
print(json.dumps([own + [os.path.realpath(folder) for folder in own], sys.path]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter, and the files it needs to see.

    Attributes:
        executable: Path of the interpreter.
        paths: Folders and files that it needs besides the system's.
    """

    executable: str
    paths: tuple[str, ...]

    @classmethod
    def at(cls, executable: str, variables: dict[str, str]) -> Interpreter:
        """Asks a Python interpreter where its packages are.

        Args:
            executable: Path of the interpreter.
            variables: Environment variables; only ``PYTHONPATH`` matters.

        Raises:
            OSError: If the interpreter cannot be started.
            ValueError: If it does not answer like a Python interpreter.
        """
        asked = subprocess.run(
            [executable, "-P", "-c", ASK], env=variables, capture_output=True, timeout=START_SECONDS, check=False
        )
        try:
            own, importable = json.loads(asked.stdout)
        except ValueError:
            raise ValueError(f"{executable} is not a working Python: {asked.stderr.decode()[-200:]!r}") from None
        seen = [*dict.fromkeys(folder for folder in own if not _is_within(folder, SYSTEM))]
        seen = [folder for folder in seen if not _is_within(folder, [other for other in seen if other != folder])]
        others = [folder for folder in dict.fromkeys(importable) if not _is_within(folder, [*SYSTEM, *seen])]
        return cls(executable, (*seen, *(path for folder in others for path in _packages(folder))))

    def mounts(self) -> Iterator[str]:
        """Yields bwrap's arguments that make these files visible."""
        for path in SYSTEM:
            if Path(path).is_symlink() and Path(path).parent == Path("/"):
                yield from ("--symlink", str(Path(path).readlink()), path)
            else:
                yield from ("--ro-bind-try", path, path)
        # Old versions of bwrap would create these folders without access for other users.
        for folder in sorted({parent for path in self.paths for parent in Path(path).parents}):
            yield from ("--dir", str(folder))
        for path in self.paths:
            yield from ("--ro-bind", path, path)


def _packages(folder: str) -> Iterator[str]:
    """Yields the importable entries of a folder, such as a project's; isolated code must not see the others."""
    if not folder or not Path(folder).is_dir():
        return
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if any(entry.name.endswith(".dist-info") for entry in entries):  # the folder contains only installed packages
        yield folder
        return
    for entry in entries:
        suffix = Path(entry.name).suffix
        is_package = entry.is_dir() and (suffix == ".egg-info" or Path(entry, "__init__.py").is_file())
        if is_package or (suffix in (".py", ".so") and entry.is_file()):
            yield entry.path


def _is_within(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)

"""Append-only JSON lines of a run, and how a restart makes them continue a checkpoint exactly."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rllm_core.errors import RunError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the disk refuses in here is one line that names the file, or ``path`` where the system names none.

    Raises:
        RunError: Instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> RunError:
    return RunError(f"{error.filename or path} cannot be written: {error.strerror or error}")


class JsonLines:
    """One file of JSON objects, one per line, appended to.

    Each line is handed to the operating system at once, so that a process that is killed leaves all of them, and is on
    the disk after `sync`. The first time the disk refuses, that is a `RunError`, which ends the run; what is written on
    the way out is tried, and not told again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab")
        self._failure: OSError | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        self.write_text(json.dumps(record, separators=(",", ":"), allow_nan=False))

    def write_text(self, line: str) -> None:
        """Append one object that is JSON already."""
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._tell(error)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._unless_told(self._file.flush)

    def sync(self) -> int:
        """Put everything on the disk.

        Returns:
            The length of the file in bytes.

        Raises:
            RunError: Whenever the disk refuses, and after it has refused before: lines may be missing then.
        """
        if self._failure is not None:
            raise _cannot_be_written(self.path, self._failure)
        self.flush()
        with writing(self.path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close."""
        self._unless_told(self._file.close)

    def _unless_told(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if self._failure is None:
            self._failure = error
            raise _cannot_be_written(self.path, error) from error


def cut_after(path: Path, offset_bytes: int, lost: Path) -> None:
    """Cut ``path`` to ``offset_bytes``; what stood behind goes to the file ``lost``.

    Raises:
        ValueError: If the file is shorter than that.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < offset_bytes:
        raise ValueError(f"{path.name} has {size} bytes, the checkpoint was made when it had {offset_bytes}")
    if size == offset_bytes:
        return
    with path.open("rb+") as file:
        file.seek(offset_bytes)
        lost.parent.mkdir(parents=True, exist_ok=True)
        lost.write_bytes(file.read())
        file.truncate(offset_bytes)
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]

"""Writes to disk: whole files, and append-only JSON lines, which a resume truncates to match its checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rllm_core.errors import DamagedFile, RunError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts disk errors to one-line errors that name the file, or ``path`` if the error names none.

    Raises:
        RunError: For an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> RunError:
    return RunError(f"{error.filename or path} cannot be written: {error.strerror or error}")


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class JsonLines:
    """Append-only file of JSON objects, one per line.

    The file is created with its first line. Each line goes to the operating system immediately, so a killed process
    loses none; `sync` puts them on disk. The first disk error is a `RunError`, which ends the run; later ones, while
    the run shuts down, are not reported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends one object."""
        self.write_text(_line(record))

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends some objects at once."""
        lines = "\n".join(map(_line, records))
        if lines:
            self.write_text(lines)

    def write_text(self, line: str) -> None:
        """Appends one serialized object."""
        try:
            if self._file is None:
                self._file = self.path.open("ab")
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        if self._file is not None:
            return self._file.tell()
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> int:
        """Syncs everything to disk; returns the length of the file in bytes.

        Raises:
            RunError: If the disk fails now or has failed before, since lines may be missing.
        """
        if self._failure is not None:
            raise _cannot_be_written(self.path, self._failure)
        if self._file is not None:
            with writing(self.path):
                os.fsync(self._file.fileno())
        return self.size

    def close(self) -> None:
        """Closes the file."""
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._failure is None:
            self._failure = error
            raise _cannot_be_written(self.path, error) from error


# Without the search for cycles, which takes as long as writing a short line; a cycle is then a RecursionError.
_line = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def check_size(path: Path, offset_bytes: int) -> int:
    """Returns the size of a file in bytes; 0 if there is none.

    Raises:
        ValueError: If the file is shorter than ``offset_bytes``.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < offset_bytes:
        raise ValueError(f"{path.name} has {size} bytes, but had {offset_bytes} when the checkpoint was saved")
    return size


def cut_after(path: Path, offset_bytes: int, lost: Path) -> None:
    """Truncates ``path`` to ``offset_bytes``, and moves the remaining bytes to the file ``lost``.

    Raises:
        ValueError: If the file is shorter than ``offset_bytes``.
    """
    if check_size(path, offset_bytes) == offset_bytes:
        return
    with path.open("rb+") as file:
        file.seek(offset_bytes)
        lost.parent.mkdir(parents=True, exist_ok=True)
        lost.write_bytes(file.read())
        file.truncate(offset_bytes)
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads all complete lines of a file, without a last line truncated by a crash.

    Raises:
        DamagedFile: If a line is not JSON.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise damaged(f"{path} line {number}", error) from error
    return found


def read_json(path: Path, named: Path | None = None) -> Any:
    """Reads a JSON file; None if it does not exist.

    Args:
        path: The file.
        named: Its path as the user gave it, for the error; None for ``path``.

    Raises:
        DamagedFile: If it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise damaged(named or path, error) from error


def damaged(what: object, error: Exception) -> DamagedFile:
    """Returns the error for a file, or a line of it, that cannot be read."""
    return DamagedFile(f"{what} is damaged: {error}; restore the file from a copy")

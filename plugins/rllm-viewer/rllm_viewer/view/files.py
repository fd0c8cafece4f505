"""Files of a running run: what was added since the last look, without what is damaged."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.run_folder.recorded import TIMINGS, TOKENS

Json = dict[str, Any]


class Added(msgspec.Struct):
    """Lines of a file that are new.

    Attributes:
        rows: The lines that can be read.
        next: Where the next look continues, in bytes.
        broken: Lines that cannot be read.
        is_new: Whether the file has been cut back, so that earlier lines are no longer valid.
    """

    rows: list[Json]
    next: int
    broken: int
    is_new: bool


def added(path: Path, position: int, start: bytes = b"") -> Added:
    """Reads the complete lines after a position that begin with ``start``; none if there is no file."""
    found = Added([], position, 0, False)
    try:
        with path.open("rb") as file:
            if position > file.seek(0, 2):
                found.next, found.is_new = 0, True
            file.seek(found.next)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                found.next += len(line)
                if line.startswith(start):
                    _decode(line, found)
    except FileNotFoundError:
        return Added([], 0, 0, position > 0)
    return found


def _decode(line: bytes, found: Added) -> None:
    try:
        found.rows.append(msgspec.json.decode(line, type=dict[str, Any]))
    except ValueError:
        found.broken += 1


class Spelled:
    """Texts of token ids in ``tokens.jsonl``, read as they come."""

    def __init__(self, run: Path) -> None:
        self._path = run / f"{TOKENS}.jsonl"
        self._lock = threading.Lock()
        self._lines: dict[int, Json] = {}
        self._position = 0

    def lines(self) -> Mapping[int, Json]:
        """Returns the line of each token id."""
        with self._lock:
            new = added(self._path, self._position)
            self._position = new.next
            if new.is_new:
                self._lines = {}
            for row in new.rows:
                if isinstance(row.get("id"), int) and isinstance(row.get("text"), str):
                    self._lines[row["id"]] = row
            return self._lines

    def texts(self) -> dict[int, str]:
        """Returns the text of each token id."""
        return {token: line["text"] for token, line in self.lines().items()}


class _Owner(msgspec.Struct):
    rollout: str


class Timings:
    """Lines of ``group_timings.jsonl`` by rollout; only their places are kept in memory."""

    def __init__(self, run: Path) -> None:
        self._path = run / f"{TIMINGS}.jsonl"
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._position = 0

    def of(self, rollouts: Iterable[str]) -> dict[str, Json]:
        """Returns the lines of some rollouts by their id; a rollout without a readable line is left out."""
        with self._lock:
            self._read()
            found: dict[str, Json] = {}
            if not self._places:
                return found
            with self._path.open("rb") as file:
                for rollout in rollouts:
                    if rollout in self._places:
                        start, length = self._places[rollout]
                        file.seek(start)
                        found[rollout] = msgspec.json.decode(file.read(length), type=dict[str, Any])
            return found

    def _read(self) -> None:
        if not self._path.is_file():
            self._places, self._position = {}, 0
            return
        if self._path.stat().st_size < self._position:
            self._places, self._position = {}, 0
        decode = msgspec.json.Decoder(_Owner).decode
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    self._places[decode(line).rollout] = (self._position, len(line) - 1)
                except ValueError:
                    pass  # A group can be shown without its seconds.
                self._position += len(line)

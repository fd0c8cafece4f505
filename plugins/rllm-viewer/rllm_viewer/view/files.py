"""Follows the files of an active run: reads the lines added since the last look, and skips damaged ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.run_folder.recorded import TIMINGS, TOKENS

Json = dict[str, Any]


class Added(msgspec.Struct):
    """New lines of a file.

    Attributes:
        rows: The readable lines.
        next: Byte offset at which the next look continues.
        broken: The unreadable lines.
        is_new: Whether the file has been cut back, so that earlier lines are no longer valid.
    """

    rows: list[Json]
    next: int
    broken: int
    is_new: bool


def added(path: Path, position: int, start: bytes | tuple[bytes, ...] = b"") -> Added:
    """Reads the complete lines after a position that begin with (one of) ``start``; none if the file is missing."""
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


class _Spelled(msgspec.Struct):
    id: int
    text: str
    bytes: str | None = None


class SpelledTokens:
    """Texts of token ids in ``tokens.jsonl``, read as the run adds them.

    Attributes:
        texts: Text of each token id.
        bytes: Bytes, in hexadecimal, of tokens that are not a complete text on their own.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / f"{TOKENS}.jsonl"
        self._lock = threading.Lock()
        self._position = 0
        self.texts: dict[int, str] = {}
        self.bytes: dict[int, str] = {}

    def update(self) -> None:
        """Reads the new ids."""
        decode = msgspec.json.Decoder(_Spelled).decode
        with self._lock:
            for line in self._new_lines():
                with contextlib.suppress(ValueError):  # A token without a text is shown as its id.
                    read = decode(line)
                    self.texts[read.id] = read.text
                    if read.bytes is not None:
                        self.bytes[read.id] = read.bytes

    def _new_lines(self) -> Iterator[bytes]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self._position:
                self.texts, self.bytes, self._position = {}, {}, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line


class Waited(msgspec.Struct):
    """Weight versions that were live when a group started, when its rollouts ended, and when it was trained."""

    started: int
    complete: int | None = None
    trained: int | None = None


class Waits:
    """Follows in ``events.jsonl`` how many weight versions groups waited, by position in the task stream."""

    _EVENTS = tuple(f'{{"event":"{name}",'.encode() for name in ("sync", "dispatch", "enqueue", "consume"))

    def __init__(self, run: Path) -> None:
        self._path = run / "events.jsonl"
        self._lock = threading.Lock()
        self._position = 0
        self._version = 0
        self._groups: dict[int, Waited] = {}

    def of(self, group: int | None) -> Waited | None:
        """Returns the versions of a group; None if the events do not record its start."""
        with self._lock:
            found = added(self._path, self._position, self._EVENTS)
            self._position = found.next
            if found.is_new:
                self._version, self._groups = 0, {}
            for row in found.rows:
                with contextlib.suppress(LookupError, TypeError):  # A group can be shown without its versions.
                    self._read(row)
            return None if group is None else self._groups.get(group)

    def _read(self, row: Json) -> None:
        if row["event"] == "sync":
            self._version = row["version"]
        elif row["event"] == "dispatch":
            self._groups[row["group"]] = Waited(row["weight_version"])
        elif row["event"] == "enqueue":
            self._groups[row["group"]].complete = self._version
        else:
            for group in self._groups.keys() & row["groups"]:
                self._groups[group].trained = row["weight_version"]


class _TimingOwner(msgspec.Struct):
    rollout: str


class Timings:
    """Lines of ``group_timings.jsonl`` by rollout; only their offsets are kept in memory."""

    def __init__(self, run: Path) -> None:
        self._path = run / f"{TIMINGS}.jsonl"
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._position = 0

    def of(self, rollouts: Iterable[str]) -> dict[str, Json]:
        """Returns the lines of some rollouts by rollout id; leaves out rollouts without a readable line."""
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
        decode = msgspec.json.Decoder(_TimingOwner).decode
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                with contextlib.suppress(ValueError):  # A group can be shown without its timings.
                    self._places[decode(line).rollout] = (self._position, len(line) - 1)
                self._position += len(line)

"""The index of a run's recorded groups: grows while the run is active, and is kept for the next viewing.

``groups_index.jsonl`` lists the groups at once; facts about their rollouts follow from ``groups.jsonl``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rllm_core.run_folder.journal import write_whole
from rllm_core.run_folder.recorded import GROUPS, INDEX
from rllm_viewer.view import facts
from rllm_viewer.view.facts import ListedGroup

FORMAT = 2
SAVED_EVERY_BYTES = 1 << 26
TAIL_BYTES = 1 << 12


class _Saved(msgspec.Struct):
    """The saved form of an index: rows of all groups up to a position of ``groups.jsonl``."""

    format: int
    position: int
    tail: str
    broken: list[int]
    rows: list[ListedGroup]


class Changes(msgspec.Struct):
    """New or changed rows since an earlier answer.

    Attributes:
        epoch: Number of times that the files were cut back or replaced; rows of another epoch are no longer valid.
        next: Position at which the next answer continues.
        read: Bytes of ``groups.jsonl`` whose rollouts are known.
        size: Bytes to read; an incomplete line at the end does not count, since the run may have been killed.
        broken: Positions of unreadable lines.
    """

    epoch: int
    next: int
    read: int
    size: int
    broken: list[int]
    rows: list[ListedGroup]


class RunIndex:
    """Rows of all recorded groups of a run.

    Args:
        run: Run folder.
        cache: Folder in which to save the index, or None.

    Attributes:
        epoch: Number of times that the files were cut back or replaced, such as by a resume.
        give_way: Called before each group, so that urgent requests need not wait until all groups are read.
    """

    def __init__(self, run: Path, cache: Path | None) -> None:
        self.give_way: Callable[[], object] = lambda: None
        self._launches = run / "plugins.json"
        self._groups = run / f"{GROUPS}.jsonl"
        self._entries = run / f"{INDEX}.jsonl"
        name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
        self._cache = None if cache is None else cache / f"{name}.json"
        self._changed = threading.Lock()
        self._updating = threading.Lock()
        self.epoch = 0
        self._launch = _identity(self._launches)
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[int, ListedGroup] = {}
        self._order: list[int] = []
        self._broken: list[int] = []
        self._position = 0
        self._listed = 0
        self._saved = 0
        self._end = _size(self._groups)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, identity: int) -> ListedGroup | None:
        """Returns the row of a group, or None if there is no such group."""
        return self._rows.get(identity)

    def rows(self) -> list[ListedGroup]:
        """Returns the rows of all groups, oldest first."""
        with self._changed:
            return [self._rows[identity] for identity in sorted(self._rows)]

    def changes(self, epoch: int, since: int) -> Changes:
        """Returns the rows that changed after an earlier answer, or all rows if its epoch is over."""
        with self._changed:
            since = since if epoch == self.epoch else 0
            identities = dict.fromkeys(self._order[since:])
            return Changes(
                self.epoch,
                len(self._order),
                self._position,
                self._end,
                list(self._broken),
                [self._rows[identity] for identity in identities],
            )

    def update(self) -> None:
        """Reads the lines that the run has added. Other threads see the rows while this continues."""
        with self._updating:
            launch = _identity(self._launches)
            is_shorter = _size(self._groups) < self._position or _size(self._entries) < self._listed
            # A resumed run has been cut back to its checkpoint, and may have become longer again since the last look.
            if is_shorter or launch != self._launch:
                with self._changed:
                    self._clear()
                    self.epoch += 1
                self._launch = launch
            if not self._rows and not self._position:
                self._restore()
            self._read_entries()
            self._read_groups()

    def _read_entries(self) -> None:
        found = []
        for start, line in _lines(self._entries, self._listed):
            self._listed = start + len(line) + 1
            with contextlib.suppress(ValueError):  # A broken line only means that its group is listed later.
                found.append(facts.ENTRIES.decode(line).row())
        with self._changed:
            for row in found:
                if row.id >= self._position:
                    self._put(row)

    def _read_groups(self) -> None:
        with self._changed:
            self._end = max(self._position, _size(self._groups))
        for start, line in _lines(self._groups, self._position):
            self.give_way()
            try:
                row = facts.of_line(line, start)
            except (ValueError, LookupError, TypeError):
                with self._changed:
                    self._broken.append(start)
                    self._position = start + len(line) + 1
                continue
            with self._changed:
                self._put(row)
                self._position = start + len(line) + 1
            if self._position - self._saved > SAVED_EVERY_BYTES:
                self._save()
        with self._changed:
            self._end = self._position
        if self._position > self._saved:
            self._save()

    def _put(self, row: ListedGroup) -> None:
        self._rows[row.id] = row
        self._order.append(row.id)

    def _restore(self) -> None:
        """Restores the saved index, if the file still begins with the same groups."""
        if self._cache is None:
            return
        try:
            saved = msgspec.json.decode(self._cache.read_bytes(), type=_Saved)
        except (OSError, ValueError):
            return  # There is no saved index, or one of another version: index from the start.
        if saved.format == FORMAT and saved.tail == self._tail(saved.position):
            with self._changed:
                self._position = self._saved = saved.position
                self._broken = saved.broken
                for row in saved.rows:
                    self._put(row)

    def _save(self) -> None:
        self._saved = self._position
        if self._cache is None:
            return
        rows = [row for row in self.rows() if row.id < self._position]
        saved = _Saved(FORMAT, self._position, self._tail(self._position), self._broken, rows)
        with contextlib.suppress(OSError):  # A full or read-only disk only costs time at the next opening.
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._cache, msgspec.json.encode(saved).decode())

    def _tail(self, position: int) -> str:
        """Returns a hash of the bytes before a position; "" if the file is shorter."""
        try:
            with self._groups.open("rb") as file:
                start = max(0, position - TAIL_BYTES)
                file.seek(start)
                content = file.read(position - start)
        except OSError:
            return ""
        return hashlib.sha256(content).hexdigest() if len(content) == position - start else ""


def cache_folder() -> Path:
    """Returns the user's folder for saved indexes."""
    given = os.environ.get("RLLM_CACHE_DIR")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllm-core"
    return base / "view"


def _lines(path: Path, position: int) -> Iterator[tuple[int, bytes]]:
    """Yields the complete lines after a position, each with its own position; a run may be writing another."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield position, line[:-1]
            position += len(line)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what distinguishes a file from those that replace it; None if it is missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

"""Buffer for complete groups between generation and training."""

from __future__ import annotations

import asyncio
import bisect
import sys
from operator import itemgetter
from pathlib import Path

from rllm_core.run_folder.journal import writing
from rllm_core.training.group import Group, GroupRules


class GroupBuffer:
    """Keeps complete groups and hands out the oldest first.

    Args:
        rules: Rules that restore a group written to disk.
        max_bytes: Memory limit; complete groups beyond it pause generation (`is_full`), or go to ``spill``.
        spill: Folder for complete groups beyond the limit; None keeps all in memory.
        in_order: Whether a group waits until all groups started before it have been handed out or dropped. Together
            with the coordinator's window, this limits the staleness of every group.
    """

    def __init__(
        self, rules: GroupRules, *, in_order: bool = False, max_bytes: int = sys.maxsize, spill: Path | None = None
    ) -> None:
        self.rules = rules
        self.in_order = in_order
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._spill = spill
        self._running: set[int] = set()
        self._complete: list[tuple[int, Group | Path]] = []  # sorted by ordinal; groups on disk are paths
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._end: BaseException | None = None

    def __len__(self) -> int:
        return len(self._complete)

    @property
    def is_full(self) -> bool:
        """Whether the complete groups exceed the memory limit."""
        return self.size_bytes > self.max_bytes

    def ordinals(self) -> list[int]:
        """Returns the ordinals of the waiting groups."""
        return [ordinal for ordinal, _ in self._complete]

    def expect(self, ordinal: int) -> None:
        """Registers a group that was started."""
        self._running.add(ordinal)

    def drop(self, ordinal: int) -> None:
        """Unregisters a group that will not complete."""
        self._running.discard(ordinal)
        self._changed.set()

    def put(self, group: Group) -> None:
        """Adds a complete group, in any order."""
        self._running.discard(group.ordinal)
        bisect.insort(self._complete, (group.ordinal, group), key=itemgetter(0))
        self.size_bytes += group.size_bytes
        if self._spill is not None and self.is_full:
            self._move_newest_to(self._spill)
        self._changed.set()

    def _move_newest_to(self, folder: Path) -> None:
        """Writes the latest groups to disk until the others fit; one group always stays in memory."""
        for position in range(len(self._complete) - 1, 0, -1):
            ordinal, group = self._complete[position]
            if isinstance(group, Path) or group.has_media:
                continue
            path = folder / f"group-{ordinal}.jsonl"
            with writing(path):
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(group.to_json() + "\n", encoding="utf-8")
            self._complete[position] = ordinal, path
            self.size_bytes -= group.size_bytes
            if not self.is_full:
                return

    async def take(self, groups: int) -> list[Group]:
        """Waits for ``groups`` complete groups, then removes and returns the oldest.

        Raises:
            BaseException: The error that `fail` or `close` was called with.
        """
        while not self._holds(groups) and self._failure is None:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        waiting, self._complete = self._complete[:groups], self._complete[groups:]
        self.size_bytes -= sum(group.size_bytes for _, group in waiting if isinstance(group, Group))
        return [self._in_memory(group) for _, group in waiting]

    def _holds(self, groups: int) -> bool:
        if len(self._complete) < groups:
            return False
        return not self.in_order or self._complete[groups - 1][0] < min(self._running, default=sys.maxsize)

    def _in_memory(self, group: Group | Path) -> Group:
        if isinstance(group, Group):
            return group
        restored = self.rules.restore(group.read_bytes())
        group.unlink()
        return restored

    def discard(self) -> list[int]:
        """Empties the buffer and returns the ordinals of its groups."""
        discarded, self._complete, self.size_bytes = self.ordinals(), [], 0
        return discarded

    def write(self, path: Path) -> list[int]:
        """Writes complete groups without media as JSON lines, for a checkpoint; returns their ordinals."""
        ordinals = []
        with path.open("wb") as file:
            for ordinal, group in list(self._complete):  # a copy: this runs in a thread while groups are added
                if isinstance(group, Path) or not group.has_media:
                    file.write(group.read_bytes() if isinstance(group, Path) else group.to_json().encode() + b"\n")
                    ordinals.append(ordinal)
        return ordinals

    def close(self, error: BaseException) -> None:
        """Marks that no group will be added; every `take` that would wait for one raises ``error``."""
        self._end = error
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Makes every current and later `take` raise ``error``; only the first error counts."""
        self._failure = self._failure or error
        self._changed.set()

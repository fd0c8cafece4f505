"""A limited number of slots, with a priority queue for validation."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class Slots:
    """Slots that are taken and given back; requests with priority are served first.

    Attributes:
        held: Start time and seconds of each use of a slot without priority that has ended, in the order of their ends.
            The reader clears the list.
    """

    def __init__(self, places: int) -> None:
        self.held: list[tuple[float, float]] = []
        self._free = places
        self._places = places
        self._seconds = 0.0
        self._held_now = 0
        self._counted_at = time.monotonic()
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    def place(self, *, priority: bool) -> _Place:
        """Returns a context that holds a slot."""
        return _Place(self, priority)

    @property
    def in_use(self) -> int:
        """Number of slots currently in use."""
        return self._places - self._free

    @property
    def wanted(self) -> int:
        """Number of contexts that hold a slot or wait for one, without those that are just being handed one."""
        return self._held_now + sum(map(len, self._waiting))

    @property
    def place_seconds(self) -> float:
        """Total time that the contexts of `place` have held slots so far, in seconds, summed over all slots."""
        return self._seconds + self._held_now * (time.monotonic() - self._counted_at)

    def _count(self, change: int) -> float:
        """Counts a context that starts (1) or stops (-1) holding a slot; returns the time."""
        now = time.monotonic()
        self._seconds += self._held_now * (now - self._counted_at)
        self._held_now += change
        self._counted_at = now
        return now

    def take_free(self) -> bool:
        """Takes a slot like `take` if one is free; returns whether it did."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def take(self, *, priority: bool) -> None:
        """Waits for a slot, which the caller must return with `give_back`; each queue is first in, first out."""
        if self.take_free():  # a free slot means that no task waits: `give_back` hands slots directly to waiting tasks
            return
        lane = self._waiting[0 if priority else 1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back()  # this task got a slot and was cancelled at the same time
            else:
                lane.remove(future)
            raise

    def give_back(self) -> None:
        """Hands the slot to the next waiting task."""
        for lane in self._waiting:
            while lane:
                future = lane.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._free += 1


class _Place:
    """Context that holds a slot; a class, since a generator-based context would take several times the memory."""

    __slots__ = ("_priority", "_since", "_slots")

    def __init__(self, slots: Slots, priority: bool) -> None:
        self._slots, self._priority = slots, priority

    async def __aenter__(self) -> None:
        await self._slots.take(priority=self._priority)
        self._since = self._slots._count(1)

    async def __aexit__(self, *_: object) -> None:
        now = self._slots._count(-1)
        if not self._priority:
            self._slots.held.append((self._since, now - self._since))
        self._slots.give_back()

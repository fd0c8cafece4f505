"""A limited number of places, with a lane for those who must not queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType


class Slots:
    """Places that are taken and given back; who asks with priority is served before everybody who waits without.

    Args:
        places: How many there are.

    Attributes:
        held: When a place was taken without priority, and for how many seconds, in the order of their ends; only those
            that have been given back. Who reads it empties it.
    """

    def __init__(self, places: int) -> None:
        self.held: list[tuple[float, float]] = []
        self._free = places
        self._places = places
        self._seconds = 0.0
        self._counted_at = time.monotonic()
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    def place(self, *, priority: bool) -> _Place:
        """An asynchronous context that holds a place."""
        return _Place(self, priority)

    @property
    def in_use(self) -> int:
        """Places that are taken now."""
        return self._places - self._free

    @property
    def place_seconds(self) -> float:
        """Seconds for which places have been in use so far, summed over the places."""
        return self._seconds + self.in_use * (time.monotonic() - self._counted_at)

    def _count(self) -> None:
        """Must come before any change of `in_use`."""
        now = time.monotonic()
        self._seconds += (self._places - self._free) * (now - self._counted_at)
        self._counted_at = now

    async def take(self, *, priority: bool) -> None:
        """Wait for a place, which `give_back` must follow; within a lane, first come, first served."""
        if self._free:  # then nobody waits: a place that is given back goes to who is next
            self._count()
            self._free -= 1
            return
        lane = self._waiting[0 if priority else 1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back()  # it was given a place and cancelled in the same moment
            else:
                lane.remove(future)
            raise

    def give_back(self) -> None:
        """Hand the place to who is next."""
        for lane in self._waiting:
            while lane:
                future = lane.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._count()
        self._free += 1


class _Place:
    __slots__ = ("_priority", "_since", "_slots")

    def __init__(self, slots: Slots, priority: bool) -> None:
        self._slots = slots
        self._priority = priority

    async def __aenter__(self) -> None:
        await self._slots.take(priority=self._priority)
        self._since = time.monotonic()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._priority:
            self._slots.held.append((self._since, time.monotonic() - self._since))
        self._slots.give_back()

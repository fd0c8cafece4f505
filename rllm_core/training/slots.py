"""A limited number of places, with a lane for those who must not queue."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """Places that are taken and given back; who asks with priority is served before everybody who waits without.

    Args:
        places: How many there are.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    def place(self, *, priority: bool) -> _Place:
        """An asynchronous context that holds a place."""
        return _Place(self, priority)

    async def take(self, *, priority: bool) -> None:
        """Wait for a place; within a lane, first come, first served."""
        if self._free:  # then nobody waits: a place that is given back goes to who is next
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
        self._free += 1


class _Place:
    __slots__ = ("_priority", "_slots")

    def __init__(self, slots: Slots, priority: bool) -> None:
        self._slots = slots
        self._priority = priority

    async def __aenter__(self) -> None:
        await self._slots.take(priority=self._priority)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.give_back()

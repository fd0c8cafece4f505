"""Splits work that arrives at one moment into slices, between which the event loop can do other work."""

from __future__ import annotations

import asyncio
from collections import deque


class Slices:
    """Lets a limited number of tasks continue per round of the event loop, in order of arrival."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left = size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop in which the next round is due, if any

    def wait(self) -> asyncio.Future[None] | None:
        """Returns the future that a task must await before it continues; None if there is room in this round."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._left = loop, self._size
            self._waiting.clear()  # drop futures of an event loop that has ended
            loop.call_soon(self._next_round, loop)
        if self._left:
            self._left -= 1
            return None
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        return future

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            self._loop = None
            return
        self._left = self._size
        while self._waiting and self._left:
            future = self._waiting.popleft()
            if not future.done():  # the waiting task may have been cancelled
                future.set_result(None)
                self._left -= 1
        loop.call_soon(self._next_round, loop)

"""Spreads work that arrives in large portions over several ticks of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Paced(Generic[ItemT]):
    """Handles items in order of arrival, a few per tick, so that other callbacks need not wait for all of them."""

    def __init__(self, handle: Callable[[ItemT], None], per_tick: int) -> None:
        self._handle = handle
        self._per_tick = per_tick
        self._items: deque[ItemT] = deque()

    def add(self, items: Iterable[ItemT]) -> None:
        """Adds items to be handled from the next tick on."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._some)
        self._items.extend(items)

    def _some(self) -> None:
        try:
            for _ in range(min(self._per_tick, len(self._items))):
                self._handle(self._items.popleft())
        finally:
            if self._items:
                asyncio.get_running_loop().call_soon(self._some)

"""A cache bounded by total weight. A count would not limit memory: prompt lengths differ by orders of magnitude."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class BoundedCache(Generic[ValueT]):
    """A least-recently-used cache; thread-safe, and empty after unpickling.

    Args:
        max_weight: Maximum total weight of the entries.
    """

    def __init__(self, max_weight: int) -> None:
        self.max_weight = max_weight
        self._entries: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()
        self._weight = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[BoundedCache[ValueT]], tuple[int]]:
        return (type(self), (self.max_weight,))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> ValueT | None:
        """Returns the value stored under ``key``, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: ValueT, weight: int) -> None:
        """Stores a value, unless it is heavier than the whole cache."""
        if weight > self.max_weight:
            return
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._weight += weight - (replaced[1] if replaced is not None else 0)
            self._entries[key] = (value, weight)
            while self._weight > self.max_weight:
                self._weight -= self._entries.popitem(last=False)[1][1]

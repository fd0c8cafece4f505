"""Gives each game its own state of Python's global `random`, which TextArena draws from, so that games do not mix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OwnRandomness:
    """The state of the global `random` while one game uses it.

    Args:
        seed: Seed of the game.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Lets the game draw; nothing else may draw meanwhile, so never await inside it."""
        outside = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outside)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Lets a copy of the game draw, and discards the changed state."""
        outside = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            random.setstate(outside)

"""TextArena draws from Python's global `random`; a game keeps a state of its own, so that games do not mix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OwnRandomness:
    """The state that the global `random` has while one game uses it.

    Args:
        seed: Seed of the game.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Lets the game draw; nothing else may run meanwhile, so never wait within it."""
        outside = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outside)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Lets a copy of the game draw, which leaves no trace."""
        outside = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            random.setstate(outside)

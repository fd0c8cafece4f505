"""Tasks that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from rllm_core.types import Task


class TasksOnDemand(Sequence[Task]):
    """A sequence of tasks, each made on its first use.

    Args:
        make: Makes the task of a number; equal numbers give equal tasks.
        size: Number of tasks.
    """

    def __init__(self, make: Callable[[int], Task], size: int) -> None:
        self._make = make
        self._size = size
        self._made: dict[int, Task] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._size))]
        number = range(self._size)[index]
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

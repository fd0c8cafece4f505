"""Named subsets of the training tasks, each in its own random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.algorithms.task_stream import TaskStream
from rllm_core.errors import ConfigError
from rllm_core.seeds import derive_seed
from rllm_core.types import Task
from rllm_core.workflow import ENDLESS

SHOWN = 8


class Order:
    """Positions of some tasks in random order; each new pass has a new order.

    Attributes:
        size: Number of tasks.
        drawn: Number of positions taken so far, which is the whole state.
    """

    def __init__(self, tasks: Sequence[Task], positions: Sequence[int], seed: int) -> None:
        self.size = len(positions)
        self._positions = positions
        self._stream = TaskStream([tasks[position] for position in positions], seed)
        self.drawn = 0

    def take(self) -> int:
        """Returns the next position."""
        self.drawn += 1
        return self._positions[self._stream.index(self.drawn - 1)]


def subsets_of(tasks: Sequence[Task], key: str, where: str) -> dict[str, list[int]]:
    """Returns the positions of the tasks, grouped by the value of a data key, in order of first appearance.

    Args:
        tasks: Training tasks.
        key: Key of `Task.data`, or of a table in it, such as ``row.level``.
        where: Name of the option, for errors.

    Raises:
        ConfigError: If a task lacks the key, or the tasks are endless.
    """
    if len(tasks) == ENDLESS:
        raise ConfigError(f"{where} = {key!r}: the training tasks are endless, so their subsets cannot be listed")
    found: dict[str, list[int]] = {}
    for position, task in enumerate(tasks):
        values = _by_key(task.data)
        if key not in values:
            has = ", ".join(map(repr, list(values)[:SHOWN])) or "nothing"
            raise ConfigError(f"{where} = {key!r}: task {task.task_id!r:.80} has no such key in its data, but {has}")
        found.setdefault(str(values[key]), []).append(position)
    return found


def _by_key(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a task's data, those of nested tables under dotted keys."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= _by_key(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def order_of(tasks: Sequence[Task], positions: Sequence[int], seed: int, *names: str) -> Order:
    """Returns an order with its own seed."""
    return Order(tasks, positions, derive_seed(seed, *names))


def shown(names: Sequence[str]) -> str:
    """Lists names for a message; only the first `SHOWN` of many."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

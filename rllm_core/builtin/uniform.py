"""``uniform``: every task once per epoch, in random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.algorithms.task_stream import TaskStream
from rllm_core.types import Task


class Uniform(TaskSampler):
    """Chooses every task once per epoch, in a random order that differs between epochs. Ignores results."""

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        self._stream = TaskStream(tasks, seed)
        self._drawn = 0
        self.epoch_tasks = len(tasks)

    def next(self, n: int) -> list[int]:
        first, self._drawn = self._drawn, self._drawn + n
        return [self._stream.index(ordinal) for ordinal in range(first, self._drawn)]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]

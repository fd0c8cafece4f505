"""Order of the tasks of a run without feedback: permutations of all tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rllm_core.seeds import derive_seed
from rllm_core.types import Task

MAX_SHUFFLED = 1 << 24
BLOCK = 4096


class TaskStream:
    """Maps every ordinal of a run to its task; every epoch is a new permutation of all tasks.

    More than `MAX_SHUFFLED` tasks, or endless ones, are visited in blocks: a permutation of the first `BLOCK` tasks,
    then one of the next. The stream has no position, so a resumed run gets the same tasks for the ordinals it still
    needs.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks = tasks
        self.seed = seed
        self._block = BLOCK if len(tasks) > MAX_SHUFFLED else len(tasks)
        self._shuffled = (-1, -1)
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def epoch(self, ordinal: int) -> int:
        """Returns the epoch of ``ordinal``, from 0."""
        return ordinal // len(self.tasks)

    def position(self, ordinal: int) -> int:
        """Returns the position of ``ordinal`` in its epoch, from 0."""
        return ordinal % len(self.tasks)

    def index(self, ordinal: int) -> int:
        """Returns the position of the task of ``ordinal`` among the tasks."""
        epoch, total = self.epoch(ordinal), len(self.tasks)
        block, position = divmod(self.position(ordinal), self._block)
        start = block * self._block
        if (epoch, block) != self._shuffled:
            generator = np.random.default_rng(derive_seed(self.seed, "epoch", epoch, *([block] if block else [])))
            self._order = generator.permutation(min(self._block, total - start))
            self._shuffled = epoch, block
        return start + int(self._order[position])

    def __getitem__(self, ordinal: int) -> Task:
        return self.tasks[self.index(ordinal)]

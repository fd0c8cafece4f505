"""The endless, reproducible order in which a run visits its training tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rllm_core.engine import derive_seed
from rllm_core.types import Task


class TaskStream:
    """Task number ``ordinal`` of a run, for any ordinal: every epoch is a fresh permutation of all tasks.

    It has no cursor of its own, so a resumed run asks for the ordinals it still needs and gets the same tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks = tasks
        self.seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def epoch(self, ordinal: int) -> int:
        """The pass over the tasks that ``ordinal`` belongs to, from 0."""
        return ordinal // len(self.tasks)

    def position(self, ordinal: int) -> int:
        """Place of ``ordinal`` in its epoch, from 0."""
        return ordinal % len(self.tasks)

    def __getitem__(self, ordinal: int) -> Task:
        epoch = self.epoch(ordinal)
        if epoch != self._epoch:
            generator = np.random.default_rng(derive_seed(self.seed, "epoch", epoch))
            self._order, self._epoch = generator.permutation(len(self.tasks)), epoch
        return self.tasks[int(self._order[self.position(ordinal)])]


def spread(tasks: Sequence[Task], rollouts: int) -> list[tuple[Task, int]]:
    """Distribute ``rollouts`` evenly over ``tasks``: pairs of task and the index of the rollout on it.

    With fewer rollouts than tasks, evenly spaced tasks get one each.
    """
    if not tasks:
        return []
    if rollouts < len(tasks):
        chosen = [tasks[i * len(tasks) // rollouts] for i in range(rollouts)]
        return [(task, 0) for task in chosen]
    each, extra = divmod(rollouts, len(tasks))
    return [(task, index) for at, task in enumerate(tasks) for index in range(each + (at < extra))]

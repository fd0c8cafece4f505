"""``placeholder``: draws solved tasks less often."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.types import Task


class PlaceholderOptions(Section):
    """``training.sampler_options``."""

    rest_passes: int = Field(default=3, ge=1, description="Passes for which a solved task is left out.")


class PlaceholderSampler(TaskSampler):
    """Draws every task once per pass, in random order, except tasks that were solved in one of the last passes."""

    options_model = PlaceholderOptions
    options: PlaceholderOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """Starts a run."""
        self._tasks, self._seed = len(tasks), seed
        self._passes = 0
        self._left: list[int] = []  # tasks left in this pass
        self._back_in: dict[int, int] = {}  # by task position: first pass in which a solved task returns

    def next(self, n: int) -> list[int]:
        """Returns the positions of the next ``n`` tasks."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        if not self._left:
            able = [task for task in range(self._tasks) if self._back_in.get(task, 0) <= self._passes]
            self._left = able or list(range(self._tasks))
            # The seed derives from the run's seed and from the state, so that a resumed run draws the same tasks.
            random.Random(f"{self._seed} {self._passes}").shuffle(self._left)
            self._passes += 1
        return self._left.pop()

    def observe(self, result: GroupResult) -> None:
        """Records the result of a task, which may arrive after the results of later tasks."""
        if result.solved == 1.0:
            self._back_in[result.position] = self._passes + self.options.rest_passes
        elif result.solved is not None:
            self._back_in.pop(result.position, None)

    def metrics(self) -> dict[str, float]:
        """Returns numbers to record with each step."""
        resting = sum(back_in > self._passes for back_in in self._back_in.values())
        return {"solved_share": resting / self._tasks}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        back_in = {str(task): back_in for task, back_in in self._back_in.items()}
        return {"tasks": self._tasks, "passes": self._passes, "left": self._left, "back_in": back_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        if state["tasks"] != self._tasks:
            raise ConfigError(f"the checkpoint has {state['tasks']} training tasks, but the workflow {self._tasks}")
        self._passes, self._left = state["passes"], list(state["left"])
        self._back_in = {int(task): back_in for task, back_in in state["back_in"].items()}

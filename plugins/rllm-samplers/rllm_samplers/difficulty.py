"""``difficulty``: prefers tasks that are neither always nor never solved.

A task without a result is ``new``. The others are in five classes by their *share*, how much of their rollouts solved
them lately: ``unsolved``, ``hard``, ``medium``, ``easy`` and ``solved``. Half of the share is that of the last group, a
quarter that of the group before, and so on: one lucky group does not put a task away. Each draw first chooses a class
and then takes the task of it that has waited longest. No task comes again before ``spacing`` other draws, as long as
there is another: a policy that sees few tasks over and over learns them by heart.

The class is chosen by discounted Thompson sampling (arXiv 1707.09727) of its *yield*: the share of its groups that came
back mixed, neither all nor none of whose rollouts solved it. For each class, a yield is drawn from a Beta distribution
of its recent groups, and the highest wins. Old groups fade, so a class that was not tried for a while is uncertain
again and gets its turn: that is how tasks that were put away are visited again, more often the more of them have become
mixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler
from rllm_core.algorithms.task_stream import TaskStream
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.seeds import derive_seed
from rllm_core.types import Task

NEW, UNSOLVED, HARD, MEDIUM, EASY, SOLVED = CLASSES = ("new", "unsolved", "hard", "medium", "easy", "solved")
UP_TO = {UNSOLVED: 0.1, HARD: 1 / 3, MEDIUM: 2 / 3, EASY: 0.9, SOLVED: 1.0}
"""Largest share of each class."""


class DifficultyOptions(Section):
    """``[training.sampler_options]`` of ``difficulty``."""

    by: Literal["solved", "rewards"] = Field(
        default="solved",
        description="What decides whether a group is mixed: which of its rollouts are correct (their rewards, if the "
        "workflow does not say), or whether their rewards differ.",
    )
    spacing: int = Field(
        default=500, ge=0, description="Least number of draws between two of one task; at most half of the tasks."
    )
    memory: int = Field(
        default=100, ge=1, description="Number of latest results that the yields of the classes rest on."
    )


class Difficulty(TaskSampler):
    """Prefers tasks that are neither always nor never solved, and revisits the others."""

    options_model = DifficultyOptions
    options: DifficultyOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """See `TaskSampler.begin`."""
        self._tasks = len(tasks)
        self._seed = seed
        self._order = TaskStream(tasks, derive_seed(seed, "difficulty", "order"))
        self._drawn = 0
        self._met = 0  # tasks that are no longer new
        self._spacing = min(self.options.spacing, len(tasks) // 2)
        # Positions with the number of their last draw, by class
        self._queues: dict[str, deque[tuple[int, int]]] = {name: deque() for name in UP_TO}
        self._shares: dict[int, float] = {}  # by position
        self._waiting: dict[int, tuple[int, str]] = {}  # position and class of a draw without a result, by ordinal
        self._groups = {name: [0.0, 0.0] for name in CLASSES}  # mixed and other groups by class of the draw, fading
        self._rewards: list[float] = []  # lowest and highest so far

    # ----------------------------------------------------------------------------------------------------------------
    # Draws

    def next(self, n: int) -> list[int]:
        """See `TaskSampler.next`."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        rng = np.random.default_rng(derive_seed(self._seed, "difficulty", self._drawn))
        able = [name for name in CLASSES if self._is_ready(name)] or [name for name in CLASSES if self._size(name)]
        drawn = {name: rng.beta(1 + self._groups[name][0], 1 + self._groups[name][1]) for name in able}
        if able:
            chosen = max(able, key=lambda name: drawn[name])
            position = self._take(chosen)
        else:  # every task has a draw without a result
            chosen, position = MEDIUM, int(rng.integers(self._tasks))
        self._waiting[self._drawn] = position, chosen
        self._drawn += 1
        return position

    def _size(self, name: str) -> int:
        return self._tasks - self._met if name == NEW else len(self._queues[name])

    def _is_ready(self, name: str) -> bool:
        """Whether the first task of a class has waited long enough."""
        if name == NEW:
            return self._size(NEW) > 0
        return bool(self._queues[name]) and self._drawn - self._queues[name][0][1] > self._spacing

    def _take(self, name: str) -> int:
        if name != NEW:
            return self._queues[name].popleft()[0]
        self._met += 1
        return self._order.index(self._met - 1)

    # ----------------------------------------------------------------------------------------------------------------
    # Results

    def observe(self, result: GroupResult) -> None:
        """See `TaskSampler.observe`."""
        position, drawn_as = self._waiting.pop(result.ordinal)
        if result.outcome == "skipped":
            return
        if (found := self._share_of(result)) is not None:
            share, is_mixed = found
            fade = 1 - 1 / self.options.memory
            for counts in self._groups.values():
                counts[0] *= fade
                counts[1] *= fade
            self._groups[drawn_as][not is_mixed] += 1
            self._shares[position] = (share + self._shares.get(position, share)) / 2
        if all(position != other for other, _ in self._waiting.values()):
            self._queues[self._class_of(position)].append((position, result.ordinal))

    def _class_of(self, position: int) -> str:
        share = self._shares.get(position, 0.5)
        return next(name for name, most in UP_TO.items() if share <= most)

    def _share_of(self, result: GroupResult) -> tuple[float, bool] | None:
        """Returns how much of a group solved its task, and whether it is mixed; None if the group has no result."""
        if result.rewards:
            bounds = (*self._rewards, *result.rewards)
            self._rewards = [min(bounds), max(bounds)]
        if result.solved is not None and (self.options.by == "solved" or not result.rewards):
            return result.solved, 0.0 < result.solved < 1.0
        if not result.rewards:
            return None
        low, high = self._rewards
        share = (fmean(result.rewards) - low) / (high - low) if high > low else 0.0
        return min(share, 1.0), min(result.rewards) != max(result.rewards)

    def metrics(self) -> dict[str, float]:
        """Returns the number of tasks in each class, and the yields."""
        sizes = {f"{name}_tasks": float(self._size(name)) for name in UP_TO}
        totals = {name: sum(counts) for name, counts in self._groups.items()}
        yields = {f"{name}_yield": self._groups[name][0] / total for name, total in totals.items() if total > 0}
        return sizes | yields

    # ----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """See `TaskSampler.state_dict`."""
        return {
            "tasks": self._tasks,
            "drawn": self._drawn,
            "met": self._met,
            "queues": {name: list(map(list, queue)) for name, queue in self._queues.items()},
            "shares": {str(position): share for position, share in self._shares.items()},
            "waiting": {str(ordinal): list(draw) for ordinal, draw in self._waiting.items()},
            "groups": {name: list(counts) for name, counts in self._groups.items()},
            "rewards": list(self._rewards),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        if state["tasks"] != self._tasks:
            raise ConfigError(
                f"training.sampler = 'difficulty': the checkpoint is of {state['tasks']} training tasks, but there are "
                f"{self._tasks}; resume with the same tasks, or start a new run from its weights with --init-from"
            )
        self._drawn, self._met = state["drawn"], state["met"]
        self._queues = {
            name: deque((position, ordinal) for position, ordinal in queue) for name, queue in state["queues"].items()
        }
        self._shares = {int(position): share for position, share in state["shares"].items()}
        self._waiting = {int(ordinal): (position, name) for ordinal, (position, name) in state["waiting"].items()}
        self._groups = {name: list(counts) for name, counts in state["groups"].items()}
        self._rewards = list(state["rewards"])

"""``difficulty``: prefers tasks that the policy solves sometimes but not always.

Tasks without a result are in class ``new``. With named subsets, each subset has a ``new`` class of its own, so its
results also count for its untried tasks. Other tasks are in one of five classes by *share*, the recent share of their
rollouts that solved them: ``unsolved``, ``hard``, ``medium``, ``easy`` and ``solved``. The last group contributes half
of the share, the one before a quarter, and so on, so one lucky group does not retire a task.

Each draw first chooses a class, and then its task that has waited longest. While other tasks are available, a task
returns only after ``spacing`` other draws, because a policy that sees few tasks over and over memorizes them.

The *yield* of a class is the share of its recent groups that were mixed: some rollouts solved the task, others did not.
Without recent groups it is 0.5. The probability of a class is proportional to the number of its rested tasks times the
cube of its yield. This saves most draws of classes that teach little, but still trains all that teach: a policy trained
only on the best class neglects the others. Old groups fade, so an untried class gets its turn again. Retired tasks are
revisited this way, more often the more of them have become mixed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rllm_core.algorithms.statistics import is_uniform
from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler, check_same_tasks
from rllm_core.algorithms.task_stream import TaskStream
from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.seeds import derive_seed
from rllm_core.types import Task
from rllm_samplers.subsets import shown, subsets_of

NAME = "difficulty"
NEW, UNSOLVED, HARD, MEDIUM, EASY, SOLVED = "new", "unsolved", "hard", "medium", "easy", "solved"
MAX_SOLVE_RATES = {UNSOLVED: 0.1, HARD: 1 / 3, MEDIUM: 2 / 3, EASY: 0.9, SOLVED: 1.0}
"""Highest solve rate of each class."""
SHARPNESS = 3
MAX_NEW_TASKS = 10_000
"""Maximum new tasks that count for a class, so that an endless class that teaches little is not drawn forever."""


class DifficultyOptions(Section):
    """``[training.sampler_options]`` of ``difficulty``."""

    by: Literal["solved", "rewards"] = Field(
        default="solved",
        description="What decides whether a group is mixed: which of its rollouts are correct (their rewards, if the "
        "workflow does not say), or whether their rewards differ.",
    )
    subsets: str = Field(
        default="",
        description="Key of the tasks' data that names their subset, such as a level or a source. Results of a "
        "subset then also count for its new tasks. If empty, all new tasks are one class.",
    )
    spacing: int = Field(
        default=500, ge=0, description="Minimum number of draws between two draws of a task; at most half the tasks."
    )
    memory: int = Field(
        default=200, ge=1, description="Number of latest results from which the yields of the classes are computed."
    )


@dataclass
class _NewTasks:
    """Tasks without a draw, in random order.

    Attributes:
        tasks: Number of tasks, including those that are no longer new.
        order: Random order of the tasks.
        positions: Positions of these tasks among all tasks; None if they are all tasks.
        met: Number of tasks that are no longer new.
    """

    tasks: int
    order: TaskStream
    positions: Sequence[int] | None = None
    met: int = 0

    @property
    def left(self) -> int:
        return self.tasks - self.met

    def take(self) -> int:
        at = self.order.index(self.met)
        self.met += 1
        return at if self.positions is None else self.positions[at]


class Difficulty(TaskSampler):
    """Prefers tasks that the policy solves sometimes but not always, and revisits the others."""

    options_model = DifficultyOptions
    options: DifficultyOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """See `TaskSampler.begin`."""
        self._tasks = len(tasks)
        self._seed = seed
        self._new = self._new_classes(tasks)
        self._classes = (*self._new, *MAX_SOLVE_RATES)
        self._drawn = 0
        self._spacing = min(self.options.spacing, len(tasks) // 2)
        self._resting: deque[tuple[int, int]] = deque()  # positions, each with the ordinal of its last draw
        self._ready: dict[str, deque[int]] = {name: deque() for name in MAX_SOLVE_RATES}  # positions by class
        self._shares: dict[int, float] = {}  # by position
        self._waiting: dict[int, tuple[int, str]] = {}  # (position, class) of each draw without a result, by ordinal
        # Fading counts of mixed and other groups, by class
        self._groups = {name: [0.0, 0.0] for name in self._classes}
        self._rewards: list[float] = []  # lowest and highest reward so far

    def _new_classes(self, tasks: Sequence[Task]) -> dict[str, _NewTasks]:
        seed = derive_seed(self._seed, NAME, "order")
        if not self.options.subsets:
            return {NEW: _NewTasks(len(tasks), TaskStream(tasks, seed))}
        found = subsets_of(tasks, self.options.subsets, "training.sampler_options.subsets")
        return {
            f"{NEW}/{subset}": _NewTasks(
                len(positions),
                TaskStream([tasks[position] for position in positions], derive_seed(seed, subset)),
                positions,
            )
            for subset, positions in found.items()
        }

    # ----------------------------------------------------------------------------------------------------------------
    # Draws

    def next(self, n: int) -> list[int]:
        """See `TaskSampler.next`."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        rng = np.random.default_rng(derive_seed(self._seed, NAME, self._drawn))
        while self._resting and self._drawn - self._resting[0][1] > self._spacing:
            position = self._resting.popleft()[0]
            self._ready[self._class_of(position)].append(position)
        weights = np.array([self._left(name) * self._yield(name) ** SHARPNESS for name in self._classes])
        if weights.any():
            chosen = self._classes[int(rng.choice(len(weights), p=weights / weights.sum()))]
            position = self._new[chosen].take() if chosen in self._new else self._ready[chosen].popleft()
        else:
            # Too few tasks to let any rest, or all have a draw without a result
            position = self._resting.popleft()[0] if self._resting else int(rng.integers(self._tasks))
            chosen = self._class_of(position)
        self._waiting[self._drawn] = position, chosen
        self._drawn += 1
        return position

    def _left(self, name: str) -> int:
        return min(self._new[name].left, MAX_NEW_TASKS) if name in self._new else len(self._ready[name])

    def _yield(self, name: str) -> float:
        mixed, other = self._groups[name]
        return (mixed + 1) / (mixed + other + 2)

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
            self._resting.append((position, result.ordinal))

    def _class_of(self, position: int) -> str:
        share = self._shares.get(position, 0.5)
        return next(name for name, most in MAX_SOLVE_RATES.items() if share <= most)

    def _share_of(self, result: GroupResult) -> tuple[float, bool] | None:
        """Returns the share of a group's rollouts that solved the task, and whether it is mixed, or None."""
        if result.rewards:
            bounds = (*self._rewards, *result.rewards)
            self._rewards = [min(bounds), max(bounds)]
        if result.solved is not None and (self.options.by == "solved" or not result.rewards):
            return result.solved, 0.0 < result.solved < 1.0
        if not result.rewards:
            return None
        low, high = self._rewards
        share = (fmean(result.rewards) - low) / (high - low) if high > low else 0.0
        return min(share, 1.0), not is_uniform(np.asarray(result.rewards))

    def metrics(self) -> dict[str, float]:
        """Returns the number of tasks in each class, and the yields."""
        resting = Counter(self._class_of(position) for position, _ in self._resting)
        sizes = {f"{name}_tasks": float(resting[name] + len(self._ready[name])) for name in MAX_SOLVE_RATES}
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
            "met": {name: new.met for name, new in self._new.items()},
            "resting": list(map(list, self._resting)),
            "ready": {name: list(positions) for name, positions in self._ready.items()},
            "shares": {str(position): share for position, share in self._shares.items()},
            "waiting": {str(ordinal): list(draw) for ordinal, draw in self._waiting.items()},
            "groups": {name: list(counts) for name, counts in self._groups.items()},
            "rewards": list(self._rewards),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        check_same_tasks(state["tasks"], self._tasks)
        if state["met"].keys() != self._new.keys():
            raise ConfigError(
                f"training.sampler = {NAME!r}: the checkpoint has new tasks in {shown(list(state['met']))}, but the "
                f"run file in {shown(list(self._new))}; resume with the same tasks and the same "
                "training.sampler_options.subsets"
            )
        for name, met in state["met"].items():
            self._new[name].met = met
        self._drawn = state["drawn"]
        self._resting = deque((position, ordinal) for position, ordinal in state["resting"])
        self._ready = {name: deque(positions) for name, positions in state["ready"].items()}
        self._shares = {int(position): share for position, share in state["shares"].items()}
        self._waiting = {int(ordinal): (position, name) for ordinal, (position, name) in state["waiting"].items()}
        self._groups = {name: list(counts) for name, counts in state["groups"].items()}
        self._rewards = list(state["rewards"])

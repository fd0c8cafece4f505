"""Contract checks for task samplers; see `check_task_sampler`."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler, checked_positions
from rllm_core.errors import UserError
from rllm_core.types import Task
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked

WINDOW = 8
WINDOWS = 30
SEED = 7
ROLLOUTS = 4

Make = Callable[[], TaskSampler]


def some_tasks(number: int = 40) -> list[Task]:
    """Returns tasks whose data has the keys ``number`` and ``subset``, which is ``a`` or ``b``."""
    return [
        Task(task_id=f"task-{position}", data={"number": position, "subset": "ab"[position % 2]})
        for position in range(number)
    ]


@dataclass
class SamplerRun:
    """Draws tasks from a sampler and returns their results to it, as the sync windows of a run do.

    A task's results depend on its position and on the number of the draw only: some tasks are always solved, some
    never, and others by some of the rollouts. A few draws have no results.

    Attributes:
        sampler: Task sampler, which has begun.
        tasks: Training tasks.
        late: Number of windows by which half of the results are late; 0 for a synchronous run.
        quarantined: Positions of tasks in quarantine.
        drawn: Positions drawn so far.
        sizes: Number of draws in each call of ``next`` within a window.
    """

    sampler: TaskSampler
    tasks: Sequence[Task]
    late: int = 0
    quarantined: frozenset[int] = frozenset()
    sizes: Sequence[int] = (WINDOW,)
    drawn: list[int] = field(default_factory=list)
    waiting: list[tuple[int, GroupResult]] = field(default_factory=list)
    window: int = 0

    def play(self) -> None:
        """Draws the tasks of a window, and returns the results that are due to the sampler."""
        for size in self.sizes:
            for position in checked_positions(self.sampler.next(size), size, self.tasks):
                self._started(position)
        self.window += 1
        due = sorted((one for when, one in self.waiting if when <= self.window), key=lambda result: result.ordinal)
        self.waiting = [(when, one) for when, one in self.waiting if when > self.window]
        for result in due:
            self.sampler.observe(replace(result, step=self.window))

    def _started(self, position: int) -> None:
        ordinal = len(self.drawn)
        self.drawn.append(position)
        if position in self.quarantined:
            self.sampler.observe(GroupResult(ordinal, position, "skipped", "quarantine", None, (), 0, self.window))
            return
        result = result_of(ordinal, position)
        self.waiting.append((self.window + 1 + self.late * (ordinal % 2), result))


def result_of(ordinal: int, position: int) -> GroupResult:
    """Returns the result of a draw."""
    rng = random.Random(f"{ordinal} {position}")
    if rng.random() < 0.05:
        return GroupResult(ordinal, position, "failed", "incomplete_group", None, (), 0, 0)
    ease = {0: 1.0, 1: 0.0}.get(position % 5, 0.5)
    rewards = tuple(float(rng.random() < ease) for _ in range(ROLLOUTS))
    solved = None if rng.random() < 0.05 else sum(rewards) / ROLLOUTS
    if len(set(rewards)) == 1:
        return GroupResult(ordinal, position, "filtered", "uniform_reward", solved, rewards, 0, 0)
    return GroupResult(ordinal, position, "trained", "trained", solved, rewards, 0, 0)


def check_task_sampler(make: Make, tasks: Sequence[Task] | None = None) -> list[CheckResult]:
    """Checks a task sampler against its contract, with scripted results.

    In a test: ``assert not [r for r in check_task_sampler(Mine) if r.outcome == "failed"]``.

    Args:
        make: Creates the sampler, with its options.
        tasks: Training tasks that fit the options. Defaults to `some_tasks`.

    Returns:
        One result per check.
    """
    return asyncio.run(checked(_TaskSamplerProbe(make, some_tasks() if tasks is None else tasks), TASK_SAMPLER_CHECKS))


@dataclass(frozen=True)
class _TaskSamplerProbe:
    """Task sampler under test."""

    make: Make
    tasks: Sequence[Task]

    def begun(self, tasks: Sequence[Task] | None = None) -> TaskSampler:
        """Returns a new sampler that has begun."""
        sampler = self.make()
        sampler.begin(self.tasks if tasks is None else tasks, SEED)
        return sampler

    def run(self, **changes: object) -> SamplerRun:
        """Returns a run with a new sampler."""
        return SamplerRun(self.begun(), self.tasks, **changes)  # type: ignore[arg-type]

    def drawn(self, **changes: object) -> list[int]:
        """Returns the positions of all windows of a run."""
        run = self.run(**changes)
        for _ in range(WINDOWS):
            try:
                run.play()
            except ValueError as error:
                raise Violation(str(error)) from error
        return run.drawn


async def _positions(probe: _TaskSamplerProbe) -> str:
    drawn = probe.drawn()
    return f"{len(drawn)} positions of {len(probe.tasks)} tasks, {len(set(drawn))} of them different"


async def _repeatable(probe: _TaskSamplerProbe) -> str:
    if probe.drawn() != probe.drawn():
        raise Violation(
            "the same seed and the same results led to other tasks; derive every random choice from the seed"
        )
    return "twice the same tasks"


async def _splitting(probe: _TaskSamplerProbe) -> str:
    whole, parts = probe.drawn(), probe.drawn(sizes=(3, 1, WINDOW - 4))
    if whole != parts:
        raise Violation(f"next(3), next(1) and next({WINDOW - 4}) return other tasks than next({WINDOW})")
    return f"next({WINDOW}) in three parts"


async def _late(probe: _TaskSamplerProbe) -> str:
    probe.drawn(late=3)
    return "results up to 3 windows late"


async def _resumed(probe: _TaskSamplerProbe) -> str:
    for late in (0, 3):
        run = probe.run(late=late)
        for window in range(WINDOWS):
            run.play()
            state = json.dumps(run.sampler.state_dict(), allow_nan=False)
            again = probe.begun()
            again.load_state_dict(json.loads(state))
            if json.dumps(again.state_dict()) != state:
                raise Violation(f"after window {window}, load_state_dict() and state_dict() return another state")
            if dict(again.metrics()) != dict(run.sampler.metrics()):
                raise Violation(f"after window {window}, a restored sampler has other metrics")
            run.sampler = again
        if run.drawn != probe.drawn(late=late):
            raise Violation("a run that is resumed after every window draws other tasks than one that is not")
    return f"{WINDOWS} resumes of a synchronous and of an asynchronous run"


async def _quarantine(probe: _TaskSamplerProbe) -> str:
    half = frozenset(range(0, len(probe.tasks), 4)) | frozenset(range(1, len(probe.tasks), 4))
    in_a_row = longest = 0
    for position in probe.drawn(quarantined=half):
        in_a_row = in_a_row + 1 if position in half else 0
        longest = max(longest, in_a_row)
    if longest > 2 * len(probe.tasks):
        raise Violation(f"{longest} tasks in a row were in quarantine; the run ends then. Leave skipped tasks out")
    return f"at most {longest} draws of tasks in quarantine in a row"


async def _few(probe: _TaskSamplerProbe) -> str:
    sizes = []
    for size in (1, 2):
        try:
            sampler = probe.begun(probe.tasks[:size])
        except UserError:
            continue
        run = SamplerRun(sampler, probe.tasks[:size], late=2)
        for _ in range(WINDOWS):
            run.play()
        sizes.append(size)
    if not sizes:
        raise NotApplicable("its options need more tasks")
    return f"{' and '.join(map(str, sizes))} tasks, each drawn again before its result"


async def _metrics(probe: _TaskSamplerProbe) -> str:
    run = probe.run()
    names: set[str] = set()
    for _ in range(WINDOWS):
        for name, value in run.sampler.metrics().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise Violation(f"metrics() has {name!r} = {value!r}; return finite numbers")
            names.add(name)
        run.play()
    return ", ".join(sorted(names)) or "none"


TASK_SAMPLER_CHECKS: dict[str, Check[_TaskSamplerProbe]] = {
    "positions": _positions,
    "repeatable": _repeatable,
    "split draws": _splitting,
    "late results": _late,
    "resume": _resumed,
    "quarantine": _quarantine,
    "few tasks": _few,
    "metrics": _metrics,
}

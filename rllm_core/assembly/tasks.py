"""Tasks of a run: loaded once, and checked before anything is allocated."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import cast

from rllm_core.algorithms.task_stream import TaskStream as TaskStream
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins.blame import blamed
from rllm_core.types import Task
from rllm_core.workflow import ENDLESS, Split, Workflow

MAX_GENERATED_TASKS = 1_000_000  # a generator may be endless, and all its tasks stay in memory
MAX_LAZY_TASKS_CHECKED = 5_000
MAX_CHECK_SECONDS = 2.0  # per split, because creating one task on demand may take a second


class Tasks:
    """Tasks of a workflow; each split is loaded once, checked and kept.

    Args:
        name: Name of the workflow in the run file, for messages.
    """

    def __init__(self, workflow: Workflow, name: str) -> None:
        self._workflow = workflow
        self._name = name
        self._known: dict[Split, Sequence[Task]] = {}

    def of(self, split: Split) -> Sequence[Task]:
        """Returns the tasks of a split.

        Lists and tuples are checked completely. Other sequences may create tasks on demand, so only their first
        `MAX_LAZY_TASKS_CHECKED` tasks are checked, or fewer if `MAX_CHECK_SECONDS` have passed. Other iterables become
        a list.

        Raises:
            ConfigError: If two tasks have the same id.
            PluginError: If ``tasks`` fails, or returns anything but tasks.
        """
        if split not in self._known:
            self._ask(split)
        return self._known[split]

    def check_apart(self) -> None:
        """Rejects ids that are in both splits.

        Raises:
            ConfigError: If there are any; the message names the first id and its positions.
            PluginError: See `of`.
        """
        train, validation = self._ask("train"), self._ask("validation")
        shared = [task_id for task_id in validation if task_id in train]
        if shared:
            what = (
                f"the id {shared[0]!r:.80}"
                if len(shared) == 1
                else f"{len(shared)} ids, {shared[0]!r:.80} for instance,"
            )
            raise ConfigError(
                f"workflow {self._name!r} has {what} in both splits: task {train[shared[0]]} of 'train' and task "
                f"{validation[shared[0]]} of 'validation'; hold tasks out of training, return [] for 'validation', or "
                'put the split into the id: Task(task_id=f"{split}-{number}", ...)'
            )

    def _ask(self, split: Split) -> dict[str, int]:
        """Loads a split, unless it is loaded already, and checks it.

        Returns:
            Task positions by id; not stored, since there may be millions.
        """
        positions: dict[str, int] = {}
        with blaming(self._name, f"tasks({split!r})"):
            tasks = self._known[split] if split in self._known else self._sequence(split)
            # Checking all of a lazy sequence could take minutes: each task may be a row that is read and parsed.
            for number in checkable(tasks, MAX_LAZY_TASKS_CHECKED):
                self._check(split, number, tasks[number], positions)
        self._known[split] = tasks
        return positions

    def _sequence(self, split: Split) -> Sequence[Task]:
        found: object = self._workflow.tasks(split)
        if inspect.iscoroutine(found) or inspect.isasyncgen(found):
            if inspect.iscoroutine(found):
                found.close()
            raise self._broken(split, "is async; make it a plain function, and do slow loading in __init__")
        if isinstance(found, Task | str | bytes | Mapping | Set) or found is None:
            what = "nothing (None)" if found is None else f"one {type(found).__name__}"
            raise self._broken(split, f"returned {what}; return a list of rllm_core.types.Task")
        if isinstance(found, Sequence) or (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
            return cast("Sequence[Task]", found)
        if isinstance(found, Iterable):
            return self._listed(split, found)
        raise self._broken(split, f"returned one {type(found).__name__}; return a list of rllm_core.types.Task")

    def _listed(self, split: Split, generated: Iterable[object]) -> list[Task]:
        tasks: list[Task] = []
        positions: dict[str, int] = {}
        for number, task in enumerate(generated):
            if number == MAX_GENERATED_TASKS:
                raise self._broken(
                    split,
                    f"yields more than {MAX_GENERATED_TASKS:,} tasks, or never ends; end it, or return a sequence "
                    "that creates its tasks on demand",
                )
            tasks.append(self._check(split, number, task, positions))
        return tasks

    def _check(self, split: Split, number: int, task: object, positions: dict[str, int]) -> Task:
        if not isinstance(task, Task):
            raise self._broken(
                split,
                f"has a {type(task).__name__} as task {number}; make it a Task(task_id=..., data=...) of "
                "rllm_core.types",
            )
        first = positions.setdefault(task.task_id, number)
        if first != number:
            raise ConfigError(
                f"workflow {self._name!r} has two {split!r} tasks with the id {task.task_id!r:.80}: task {first} and "
                f"task {number}; every task needs its own id, stable between runs, such as its row number"
            )
        return task

    def _broken(self, split: Split, what: str) -> PluginError:
        return PluginError(f"workflow {self._name!r}: tasks({split!r}) {what}")


@contextmanager
def blaming(workflow: str, call: str) -> Iterator[None]:
    """Converts errors of a workflow's code to one line with their location."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # third-party code
        raise PluginError(f"workflow {workflow!r}: {call} failed: {blamed(error)}") from error


def checkable(tasks: Sequence[Task], most: int) -> Iterator[int]:
    """Yields the positions to check: all of a list or tuple, otherwise the first ``most`` within a limited time."""
    if isinstance(tasks, list | tuple):
        yield from range(len(tasks))
        return
    until = time.monotonic() + MAX_CHECK_SECONDS
    for number in range(min(len(tasks), most)):
        yield number
        if time.monotonic() > until:
            return


def spread(tasks: Sequence[Task], rollouts: int) -> list[tuple[Task, int]]:
    """Distributes ``rollouts`` evenly over ``tasks``; returns pairs of task and rollout index.

    With fewer rollouts than tasks, evenly spaced tasks get one rollout each; if tasks are endless, the first tasks do.
    """
    if not len(tasks):
        return []
    if len(tasks) == ENDLESS:
        return [(tasks[number], 0) for number in range(rollouts)]
    if rollouts < len(tasks):
        chosen = [tasks[i * len(tasks) // rollouts] for i in range(rollouts)]
        return [(task, 0) for task in chosen]
    each, extra = divmod(rollouts, len(tasks))
    return [(task, index) for at, task in enumerate(tasks) for index in range(each + (at < extra))]

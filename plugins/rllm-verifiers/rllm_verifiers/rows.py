"""The rows of a taskset as tasks: two splits without a common question, created on demand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.types import Task
from rllm_core.workflow import LazyTasks, Split
from rllm_verifiers.loading import explained

INFINITE_SIZE = 1_000_000
HELD_OUT_ONE_IN = 5
# Fields that name a row, and so are not part of its question.
NAMES = {"idx", "id", "name"}


class Rows:
    """The tasks of both splits, by ranges of the taskset's order.

    The first rows are held out. A later row with the same question, ignoring case, is not trained on. Rows of an
    infinite taskset are created when needed; those of a finite one all at once, as verifiers does.

    Args:
        environment: An environment of verifiers.
        name: Name of the environment, for errors.
        train_size: Maximum number of tasks to train on.
        validation_size: Maximum number of tasks to hold out.
    """

    def __init__(self, environment: Any, name: str, *, train_size: int | None, validation_size: int) -> None:
        self._environment = environment
        self._name = name
        taskset = environment.taskset
        self._stream = self._rows(taskset)
        held_out = validation_size
        if taskset.bounded:
            rows = list(self._stream)
            if not rows:
                raise ConfigError(f"environment {name!r} has no tasks")
            self._stream = iter(rows)
            held_out = min(held_out, len(rows) // HELD_OUT_ONE_IN)
        self._held_out = list(self._distinct(held_out))
        self._by_prompt = len({_prompt(row) for row in self._held_out}) > 1
        self._asked = {self._question(row) for row in self._held_out}
        self._train: Sequence[Task]
        later = (self._task(row) for row in self._stream if self._question(row) not in self._asked)
        if taskset.bounded:
            self._train = list(itertools.islice(later, train_size))
        else:
            self._train = _made_on_demand(later, train_size or INFINITE_SIZE, name)

    def split(self, split: Split) -> Sequence[Task]:
        """Returns the tasks of a split."""
        return self._train if split == "train" else [self._task(row) for row in self._held_out]

    def _rows(self, taskset: Any) -> Iterator[Any]:
        """Yields the rows; reduces an error of the taskset to one line."""
        with explained(self._name):
            rows = iter(taskset)
        while True:
            with explained(self._name):
                row = next(rows, None)
            if row is None:
                return
            yield row

    def _distinct(self, count: int) -> Iterator[Any]:
        """Yields the first distinct rows, as many as requested."""
        seen = set()
        for row in itertools.islice(self._stream, count):
            if (said := _said(row)) not in seen:
                seen.add(said)
                yield row

    def _question(self, row: Any) -> str:
        """Returns a row's question for comparison. Where all prompts are equal, as in games, that is the whole row."""
        return _prompt(row) if self._by_prompt else _said(row)

    def _task(self, row: Any) -> Task:
        """Returns a row as a task whose data lets a worker recreate the row, as verifiers' servers do.

        Raises:
            ConfigError: If the row cannot be played on this machine, or does not survive JSON.
        """
        from verifiers.v1.utils.compile import resolve_runtime_config

        number = row.data.idx
        try:
            for spec in _agents(self._environment):
                resolve_runtime_config(spec.runtime, row)
        except ValueError as error:
            raise ConfigError(f"environment {self._name!r} cannot be played on this machine: {error}") from error
        data = row.data.model_dump(mode="json")  # include defaults, such as the role of a message
        if type(row).data_type().model_validate(data) != row.data:
            raise ConfigError(
                f"row {number} of environment {self._name!r} changes in a round trip through JSON, in which "
                "verifiers itself sends rows: its TaskData may only have types that JSON keeps"
            )
        return Task(task_id=f"{self._environment.taskset.config.id}-{number}", data={"row": data})


def _made_on_demand(stream: Iterator[Task], length: int, name: str) -> LazyTasks:
    """Returns tasks of an infinite stream, created up to the highest one requested."""
    made: list[Task] = []

    def task(position: int) -> Task:
        made.extend(itertools.islice(stream, max(0, position + 1 - len(made))))
        if position >= len(made):
            raise ConfigError(
                f"environment {name!r} declares itself infinite, but ends after {len(made)} training tasks: set "
                f"verifiers.train_size = {len(made)}"
            )
        return made[position]

    return LazyTasks(task, length)


def _agents(environment: Any) -> list[Any]:
    import verifiers.v1 as vf

    return [value for _, value in environment.config if isinstance(value, vf.AgentConfig)]


def _prompt(row: Any) -> str:
    """Returns the prompt without case and white space; "" if the row lets another side open the conversation."""
    data = row.data.model_dump(mode="json", include={"prompt", "system_prompt"}, exclude_none=True)
    return _folded(data) if data.get("prompt") else ""


def _said(row: Any) -> str:
    """Returns a row without its names, and without case and white space."""
    return _folded(row.data.model_dump(mode="json", exclude=NAMES, exclude_none=True))


def _folded(data: Any) -> str:
    return "".join(json.dumps(data, sort_keys=True, ensure_ascii=False).casefold().split())

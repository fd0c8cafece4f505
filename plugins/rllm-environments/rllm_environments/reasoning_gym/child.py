"""What touches reasoning-gym: creates questions and scores answers, in child processes.

A recipe says how to create an entry. Entries themselves never cross a process boundary: JSON turns their tuples into
lists, and then some checkers reject the right answer.
"""

from __future__ import annotations

import functools
import json
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rllm_core.types import Task
from rllm_environments.splits import Ranges

ENTRIES_KEPT = 4096


class _TooLong(BaseException):
    """The CPU time of a checker is used up. Not an `Exception`, since checkers catch those."""


@functools.lru_cache(maxsize=8)
def dataset(environment: str, options: str, seed: int, size: int) -> Any:
    """Returns a dataset of reasoning-gym.

    Args:
        environment: Name of the dataset.
        options: Its configuration, as a JSON object.
        seed: Seed of its first item.
        size: Number of items.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that reasoning-gym imports
        import reasoning_gym

        return reasoning_gym.create_dataset(environment, **json.loads(options), seed=seed, size=size)


@functools.lru_cache(maxsize=ENTRIES_KEPT)
def entry(environment: str, options: str, seed: int, size: int, index: int) -> Any:
    """Returns an item of a dataset, with its question and the dataset's own answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataset(environment, options, seed, size)[index]


def key_of(recipe: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Returns what identifies the dataset of a recipe."""
    ranges = Ranges(recipe["train_size"], recipe["validation_size"])
    return recipe["environment"], json.dumps(recipe["options"], sort_keys=True), recipe["seed"], ranges.size


def pose(recipe: Mapping[str, Any]) -> tuple[int, str]:
    """Returns index and text of a task's question.

    Args:
        recipe: ``data`` of a task.
    """
    key = key_of(recipe)
    ranges = Ranges(recipe["train_size"], recipe["validation_size"])

    def question_at(index: int) -> str | None:
        try:
            return str(entry(*key, index)["question"])
        except RuntimeError:  # how a generator says that its random attempts found nothing, such as that of `maze`
            return None

    return ranges.find(recipe["split"], recipe["number"], question_at)


def score(task: Task, text: str) -> tuple[float, dict[str, float]]:
    """Scores a text with the dataset's own checker.

    Many checkers raise on a text of another form than they expect. That, or too long a time, rejects the text; an error
    of anything else is raised.

    Args:
        task: Task whose ``data`` is a recipe with the ``index`` of its question, and the ``check_seconds``.
        text: Answer of the model.
    """
    key = key_of(task.data)
    data, item = dataset(*key), entry(*key, task.data["index"])
    try:
        with warnings.catch_warnings(), _within(task.data["check_seconds"]):
            warnings.simplefilter("ignore")
            return float(data.score_answer(text, item)), {"rejected": 0.0}
    except MemoryError:  # the interpreter may be damaged
        raise
    except BaseException:  # third-party code on hostile text, which may also raise SystemExit where it is executed
        return 0.0, {"rejected": 1.0}


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises `_TooLong` after some CPU time.

    The wall time limit of the process also counts imports and creating the entry, and passes sooner on a busy machine.
    """

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

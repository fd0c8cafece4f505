"""All uses of reasoning-gym: creates questions and scores answers, in child processes.

A recipe describes how to create an entry. Entries themselves never cross a process boundary: JSON turns their tuples
into lists, and then some checkers reject the right answer.
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
    """A checker has used up its CPU time. Not an `Exception`, because checkers catch those."""


@functools.lru_cache(maxsize=8)
def dataset(environment: str, options: str, seed: int, size: int) -> Any:
    """Returns a dataset of reasoning-gym.

    Args:
        environment: Name of the dataset.
        options: Configuration of the dataset, as a JSON object.
        seed: Seed of its first item.
        size: Number of items.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from libraries that reasoning-gym imports
        import reasoning_gym

        return reasoning_gym.create_dataset(environment, **json.loads(options), seed=seed, size=size)


@functools.lru_cache(maxsize=ENTRIES_KEPT)
def entry(environment: str, options: str, seed: int, size: int, index: int) -> Any:
    """Returns an item of a dataset, with its question and the dataset's own answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataset(environment, options, seed, size)[index]


def key_of(recipe: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Returns the key of a recipe's dataset."""
    ranges = Ranges(recipe["train_size"], recipe["validation_size"])
    return recipe["environment"], json.dumps(recipe["options"], sort_keys=True), recipe["seed"], ranges.size


def pose(recipe: Mapping[str, Any]) -> tuple[int, str]:
    """Returns index and text of a task's question.

    Args:
        recipe: The ``data`` of a task.
    """
    key = key_of(recipe)
    ranges = Ranges(recipe["train_size"], recipe["validation_size"])

    def question_at(index: int) -> str | None:
        try:
            return str(entry(*key, index)["question"])
        except RuntimeError:  # raised by generators, such as `maze`, whose random attempts found nothing
            return None

    return ranges.find(recipe["split"], recipe["number"], question_at)


def score(task: Task, text: str) -> tuple[float, dict[str, float]]:
    """Scores a text with the dataset's own checker.

    Many checkers raise on a text of an unexpected form. Such an error, or a timeout, rejects the text; an error with
    any other cause is raised.

    Args:
        task: Task whose ``data`` is a recipe with the ``index`` of its question and the ``check_seconds``.
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
    except BaseException:  # third-party code on hostile text, which may raise SystemExit if executed
        return 0.0, {"rejected": 1.0}


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises `_TooLong` after a limit of CPU time.

    The process's wall-time limit also covers imports and creating the entry, and expires sooner on a busy machine.
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

"""A taskset in verifiers' format, small enough for the starter model: say which of three letters comes first.

Nothing in it knows of rllm-core but `warm_start`, which only a model made from scratch needs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf

__all__ = ["Earliest"]

LETTERS = "abcdefgh"


class EarliestData(vf.TaskData):
    """A question and its answer."""

    answer: str


class EarliestTask(vf.Task[EarliestData]):
    """Scores the answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right letter alone."""
        return float(trace.last_reply.strip() == self.data.answer)


class Earliest(vf.Taskset[EarliestTask]):
    """Three different letters in every order: 336 questions."""

    def load(self) -> Iterator[EarliestTask]:
        """Yields the tasks."""
        words = list(itertools.permutations(LETTERS, 3))
        random.Random(0).shuffle(words)
        for word in words:
            yield EarliestTask(EarliestData(prompt=question(word), answer=min(word)), self.config.task)


def question(letters: Sequence[str]) -> str:
    """Returns the prompt."""
    return f"first: {' '.join(letters)}"


def warm_start(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields conversations with any of the letters as the answer, so that a new model is right in one of three."""
    while True:
        letters = rng.sample(LETTERS, 3)
        yield [
            {"role": "user", "content": question(letters)},
            {"role": "assistant", "content": rng.choice(letters)},
        ]

"""A taskset of one turn, without an end: the last of some letters."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LastLetter"]


class LetterData(vf.TaskData):
    """A question and its answer."""

    answer: str


class LetterTask(vf.Task[LetterData]):
    """Scores the answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right letter alone, .25 for an answer that has it."""
        reply = trace.last_reply.strip()
        if reply == "raise":
            raise ValueError("this reward cannot judge that")
        return 1.0 if reply == self.data.answer else 0.25 * (self.data.answer in reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Length of the answer."""
        return float(len(trace.last_reply))


class LetterConfig(vf.TasksetConfig):
    """Which letters there are, and how many of them in a question."""

    letters: str = "abcdefghijklmnopqrstuvwxyz"
    length: int = 3
    seed: int = 0


class LastLetter(vf.Taskset[LetterTask, LetterConfig]):
    """Random letters."""

    INFINITE = True

    def load(self) -> Iterator[LetterTask]:
        """Yields questions."""
        rng = random.Random(self.config.seed)
        while True:
            letters = rng.sample(self.config.letters, self.config.length)
            yield LetterTask(LetterData(prompt=f"last: {' '.join(letters)}", answer=letters[-1]), self.config.task)

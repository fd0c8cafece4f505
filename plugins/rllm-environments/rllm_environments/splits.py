"""Held-out splits of generated questions: index ranges of one dataset that share no question.

A generator that draws from ``Random(seed + index)`` gives almost the same questions for neighboring seeds, so splits by
seed leak. Different indices may also ask the same question. Therefore the text decides: the hash of a question,
ignoring case and white space, determines its split, and a task takes the first question of its split from its place in
the split's range. So tasks are independent of each other, can be created in any order, and no split needs to know the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from rllm_core.workflow import Split

HELD_OUT_ONE_IN = 5
TRAIN_INDICES_PER_TASK = 2
VALIDATION_INDICES_PER_TASK = 20
"""High enough that two tasks of a split rarely take the same index."""
MAX_TRIES = 400


class TooFewQuestions(ValueError):
    """No question was found for a split."""


def is_held_out(question: str) -> bool:
    """Returns whether a question belongs to the validation split; true for about one in five.

    It ignores case and white space, since checkers often do.
    """
    text = " ".join(question.casefold().split())
    digest = blake2b(f"question:{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Ranges:
    """Index ranges of the splits in one dataset.

    Attributes:
        train: Number of training tasks.
        validation: Number of validation tasks.
    """

    train: int
    validation: int

    @property
    def size(self) -> int:
        """Size of the dataset."""
        return self.validation * VALIDATION_INDICES_PER_TASK + self.train * TRAIN_INDICES_PER_TASK

    def indices(self, split: Split, number: int) -> Iterator[int]:
        """Yields the indices at which task ``number`` of a split looks for its question, in order."""
        held_out = self.validation * VALIDATION_INDICES_PER_TASK
        start, stop, each = (
            (0, held_out, VALIDATION_INDICES_PER_TASK)
            if split == "validation"
            else (held_out, self.size, TRAIN_INDICES_PER_TASK)
        )
        for tried in range(min(MAX_TRIES, stop - start)):
            yield start + (number * each + tried) % (stop - start)

    def find(self, split: Split, number: int, question_at: Callable[[int], str | None]) -> tuple[int, str]:
        """Returns index and text of a task's question.

        Args:
            split: Split of the task.
            number: Number of the task in its split.
            question_at: Returns the question at an index; None if the dataset has none there.

        Raises:
            TooFewQuestions: If none of the tried indices has a question of the split.
        """
        asked: set[str] = set()
        for index in self.indices(split, number):
            question = question_at(index)
            if question is None:
                continue
            if is_held_out(question) is (split == "validation"):
                return index, question
            asked.add(question)
        raise TooFewQuestions(
            f"{len(asked)} different questions were drawn, and none of them belongs to the {split} split, which gets "
            f"{'one' if split == 'validation' else f'{HELD_OUT_ONE_IN - 1}'} in {HELD_OUT_ONE_IN}: choose options with "
            "more questions, or another seed"
        )

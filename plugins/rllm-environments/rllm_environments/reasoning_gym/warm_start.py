"""Warm-start conversations: the questions of the training split with answers that only have the right form.

Where answers consist of the letters or words of the question, they are those of the right answer in random order, so
that the right one is a choice among few. That tells which letters to use, but not their order. Elsewhere, the answers
are those of other questions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from rllm_core.types import Task
from rllm_environments.reasoning_gym import child, datasets

OF_LETTERS = ("letter_jumble", "palindrome_generation", "spell_backward")
OF_WORDS = {"sentence_reordering": " ", "word_sequence_reversal": ", ", "word_sorting": ", "}
"""Datasets whose answers are the question's words, and what separates them."""
QUESTIONS, QUESTIONS_OF_SLOW = 1000, 32


def asked_and_answered(environment: str, tasks: Sequence[Task], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields questions with answers endlessly. Creates questions in this process: they are no model's output.

    Args:
        environment: Name of the dataset.
        tasks: Training tasks.
        rng: Source of all randomness; equal states yield equal answers.
    """
    wanted = QUESTIONS_OF_SLOW if datasets.findings(environment)["slow"] else QUESTIONS
    asked: list[tuple[str, str]] = []
    for task in itertools.islice(tasks, wanted):
        index, question = child.pose(task.data)
        answer = child.entry(*child.key_of(task.data), index)["answer"]
        if answer is not None:
            asked.append((question, str(answer)))
    while asked:
        question, answer = rng.choice(asked)
        yield question, _shuffled(environment, answer, rng) or rng.choice(asked)[1]


def _shuffled(environment: str, answer: str, rng: random.Random) -> str | None:
    """Returns the letters or words of an answer in random order, or None if answers are not made of the question's."""
    if environment in OF_LETTERS:
        return "".join(rng.sample(answer, k=len(answer)))
    if environment in OF_WORDS:
        separator = OF_WORDS[environment]
        words = answer.split(separator)
        return separator.join(rng.sample(words, k=len(words)))
    return None

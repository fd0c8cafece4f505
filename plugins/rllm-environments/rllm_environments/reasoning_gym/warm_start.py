"""Warm-start conversations: training questions with answers that are right only in form.

If a dataset's answers consist of letters or words of the question, the warm start shuffles those of the right answer.
It thus teaches which letters to use, but not their order, and the right answer is one of few choices. For other
datasets, it uses the answers of other questions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from rllm_core.types import Task
from rllm_environments.reasoning_gym import child, datasets

LETTER_DATASETS = ("letter_jumble", "palindrome_generation", "spell_backward")
WORD_SEPARATORS = {"sentence_reordering": " ", "word_sequence_reversal": ", ", "word_sorting": ", "}
"""Separator of the words in an answer, for datasets whose answers consist of the question's words."""
QUESTIONS, QUESTIONS_OF_SLOW = 1000, 32


def asked_and_answered(environment: str, tasks: Sequence[Task], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields questions with answers endlessly. Creates the questions in this process, because no model wrote them.

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
    """Returns an answer's letters or words in random order, or None if answers do not consist of the question's."""
    if environment in LETTER_DATASETS:
        return "".join(rng.sample(answer, k=len(answer)))
    if environment in WORD_SEPARATORS:
        separator = WORD_SEPARATORS[environment]
        words = answer.split(separator)
        return separator.join(rng.sample(words, k=len(words)))
    return None

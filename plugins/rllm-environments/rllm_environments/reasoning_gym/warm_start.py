"""Warm-start conversations: the questions of the training split with answers that only have the right form.

Where answers consist of the letters or words of the question, they are those of the right answer in random order, so
that the right one is a choice among few. That tells which letters to use, but not their order. Elsewhere, the answers
are those of other questions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rllm_environments.reasoning_gym import child, datasets

if TYPE_CHECKING:
    from rllm_environments.reasoning_gym.workflow import ReasoningGymWorkflow

OF_LETTERS = ("letter_jumble", "palindrome_generation", "spell_backward")
OF_WORDS = {"sentence_reordering": " ", "word_sequence_reversal": ", ", "word_sorting": ", "}
"""Datasets whose answers are the question's words, and what separates them."""
QUESTIONS, QUESTIONS_OF_SLOW = 1000, 32


def conversations(workflow: ReasoningGymWorkflow, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields conversations endlessly. Creates questions in this process: they are no model's output.

    Args:
        workflow: Workflow with the questions.
        rng: Source of all randomness; equal states yield equal conversations.
    """
    environment = workflow.config.environment
    tasks = workflow.tasks("train")
    wanted = QUESTIONS_OF_SLOW if datasets.findings(environment)["slow"] else QUESTIONS
    asked: list[tuple[str, str]] = []
    for task in itertools.islice(tasks, wanted):
        index, question = child.pose(task.data)
        answer = child.entry(*child.key_of(task.data), index)["answer"]
        if answer is not None:
            asked.append((question, str(answer)))
    while asked:
        question, answer = rng.choice(asked)
        given = _shuffled(environment, answer, rng) or rng.choice(asked)[1]
        said = f"<answer>{given}</answer>" if workflow.config.answer == "tags" else given
        yield [*workflow.prompt(question), {"role": "assistant", "content": said}]


def _shuffled(environment: str, answer: str, rng: random.Random) -> str | None:
    """Returns the letters or words of an answer in random order, or None if answers are not made of the question's."""
    if environment in OF_LETTERS:
        return "".join(rng.sample(answer, k=len(answer)))
    if environment in OF_WORDS:
        separator = OF_WORDS[environment]
        words = answer.split(separator)
        return separator.join(rng.sample(words, k=len(words)))
    return None

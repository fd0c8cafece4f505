"""Grader of answers."""

from rllm_core.types import Task


def letters_in_place(task: Task, text: str) -> float:
    """1 for the answer itself, else half the share of letters in their place; 0 for an answer of another length."""
    answer: str = task.data["answer"]
    if text == answer:
        return 1.0
    if len(text) != len(answer):
        return 0.0
    return 0.5 * sum(given == wanted for given, wanted in zip(text, answer, strict=True)) / len(answer)

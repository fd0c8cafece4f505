"""Asks a reward function, before the first step, whether it prefers a row's own answer to a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm_core.sandbox import ChildError
from rllm_core.services import RewardFunction
from rllm_core.types import Task

# Formats of an answer that reward functions commonly expect; a function that understands one of them is fine.
FORMATS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "The answer is {}")


async def complaint(reward: RewardFunction, tasks: Sequence[Task]) -> str | None:
    """Returns what is wrong with a reward function, or None.

    Args:
        reward: The function.
        tasks: Some tasks with ``data["answer"]``. The first one is asked for, and answered also with that of another.
    """
    answers = [_first(task.data["answer"]) for task in tasks]
    other = next((answer for answer in answers[1:] if answer != answers[0]), None)
    wrong = "" if other is None else other
    try:
        empty = await reward(tasks[0], "")
        shown = None
        for form in FORMATS:
            own, given = await reward(tasks[0], form.format(answers[0])), await reward(tasks[0], form.format(wrong))
            if own > given and own > empty:
                return None
            shown = shown or (own, given)
    except (ChildError, ValueError):
        return None  # a rollout that gets such a text fails, and says so
    assert shown is not None
    return (
        f"gives the first row's own answer {shown[0]:g}, another row's answer {shown[1]:g} and an empty text "
        f"{empty:g}: it should prefer its own; is it always the same, or is dataset.answer the wrong column?"
    )


def _first(answer: Any) -> str:
    return str(answer) if isinstance(answer, str | int | float) else str(next(iter(answer), ""))

"""Checks before the first step whether a reward function prefers a row's own answer to a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm_core.sandbox import ChildError
from rllm_core.services import RewardFunction
from rllm_core.types import Task

# Answer formats that reward functions commonly expect; a function needs to understand only one of them.
FORMATS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "The answer is {}")


async def complaint(reward: RewardFunction, tasks: Sequence[Task]) -> str | None:
    """Returns a warning about a reward function, or None.

    Args:
        reward: The reward function.
        tasks: Some tasks with ``data["answer"]``. The check answers the first task with its own answer and with that of
            another task.
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
        return None  # a rollout with such a text will fail with its own error
    assert shown is not None
    return (
        f"gives the first row's own answer {shown[0]:g}, another row's answer {shown[1]:g} and an empty text "
        f"{empty:g}: it should prefer its own; is it always the same, or is dataset.answer the wrong column?"
    )


def _first(answer: Any) -> str:
    return str(answer) if isinstance(answer, str | int | float) else str(next(iter(answer), ""))

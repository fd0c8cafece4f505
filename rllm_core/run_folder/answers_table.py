"""Table of sampled answers, with a row for each rollout of the recorded groups, for terminals and trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.tracker import Cell
from rllm_core.types import Step

NAME = "answers"
COLUMNS = ("task", "question", "expected", "answer", "reward")


def is_due(every: int, step: int) -> bool:
    """Whether the table is due after a step, according to ``training.answers_table_every_steps``."""
    return every > 0 and step % every == 0


def rows(groups: Sequence[RecordedGroup]) -> Iterator[list[Cell]]:
    """Yields a row in the order of `COLUMNS` for each rollout, with None for missing values."""
    for group in groups:
        expected = group.task.data.get("answer")
        for rollout in group.rollouts:
            question, answer = question_and_answer(rollout)
            yield [group.task.task_id, question, None if expected is None else str(expected), answer, rollout.reward]


def question_and_answer(rollout: RecordedRollout) -> tuple[str | None, str | None]:
    """Returns the last message of the first prompt, and the last answer; None for a rollout without model calls."""
    steps: list[Step] = [step for trajectory in rollout.episode.trajectories for step in trajectory.steps]
    if not steps:
        return None, None
    return _text(steps[0].messages[-1]) if steps[0].messages else None, steps[-1].text


def _text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, without its images."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")

"""The tokens of a recorded rollout: ids, texts, log-probabilities and advantages, as they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from rllm_core.run_folder.groups import RecordedRollout
from rllm_core.text import counted
from rllm_core.types import Step
from rllm_viewer.terminal import ABSENT, fitted, number, quoted, visible_line

TEXT_COLUMNS = 34

Place = tuple[int, int, int]
"""Trajectory, step and position in the completion; position -1 is the prompt."""


def tokens(
    rollout: RecordedRollout, texts: Mapping[int, str], differs: Place | None, other: int | None
) -> Iterator[RenderableType]:
    """Yields the tokens of a rollout: prompts as running text of ids, sampled tokens one per line.

    Args:
        rollout: Rollout to show.
        texts: Text of each token id.
        differs: First difference from another rollout, which is marked.
        other: Index of that rollout.
    """
    mark = f"  <- first difference from rollout {other}"
    for at, trajectory in enumerate(rollout.episode.trajectories):
        before: Step | None = None
        for position, step in enumerate(trajectory.steps):
            new, start = _new_prompt(step, before)
            title = f"prompt of call {position + 1}" if start == 0 else f"new in the prompt of call {position + 1}"
            role = f" (role {visible_line(trajectory.role)})" if len(rollout.episode.trajectories) > 1 else ""
            marked = mark if differs == (at, position, -1) else ""
            yield Text(f"{title}{role}: {counted(len(new), 'token')}{marked}", style="bold")
            if len(new):
                running = " ".join(f"{token} {_text(token, texts)}" for token in new.tolist())
                yield Text(running, style="dim", overflow="fold")
            yield _header(_numbers(rollout.corrections, at, position))
            yield from _sampled(rollout, (at, position), step, texts, differs, mark)
            before = step


def first_difference(one: RecordedRollout, other: RecordedRollout) -> Place | None:
    """Returns where the tokens of two rollouts first differ, or None if one is a prefix of the other."""
    for at, (first, second) in enumerate(zip(one.episode.trajectories, other.episode.trajectories, strict=False)):
        for position, (left, right) in enumerate(zip(first.steps, second.steps, strict=False)):
            if not np.array_equal(left.prompt_ids, right.prompt_ids):
                return at, position, -1
            length = min(len(left.completion_ids), len(right.completion_ids))
            unequal = np.flatnonzero(left.completion_ids[:length] != right.completion_ids[:length])
            if len(unequal):
                return at, position, int(unequal[0])
            if len(left.completion_ids) != len(right.completion_ids):
                return at, position, length
    return None


def _new_prompt(step: Step, before: Step | None) -> tuple[Any, int]:
    """Returns the prompt tokens that the previous call lacks, and their start."""
    start = 0
    if before is not None and step.continues(before):
        start = len(before.prompt_ids) + len(before.completion_ids)
    return step.prompt_ids[start:], start


def _header(corrections: Any) -> Text:
    weight = f"{'WEIGHT':>9}" if corrections is not None else ""
    return Text(f"{'#':>5} {'ID':>8}  {'TEXT':<{TEXT_COLUMNS}}{'LOGPROB':>9}{'ADVANTAGE':>11}{weight}", style="bold")


def _sampled(
    rollout: RecordedRollout,
    place: tuple[int, int],
    step: Step,
    texts: Mapping[int, str],
    differs: Place | None,
    mark: str,
) -> Iterator[RenderableType]:
    advantages = _numbers(rollout.advantages, *place)
    corrections = _numbers(rollout.corrections, *place)
    for position, token in enumerate(step.completion_ids.tolist()):
        text = Text(fitted(_text(token, texts), TEXT_COLUMNS - 1))
        text.align("left", TEXT_COLUMNS)
        advantage = _at(advantages, position)
        style = "" if not advantage else "green" if advantage > 0 else "red"
        weight = f"{number(_at(corrections, position)):>9}" if corrections is not None else ""
        numbers = f"{number(_at(step.logprobs, position)):>9}{number(advantage):>11}{weight}"
        line = Text.assemble(f"{position:>5} {token:>8}  ", text, numbers, style=style)
        yield line
        if differs == (*place, position):
            yield Text(f"{'':>16}{mark.strip().replace('<-', '^')}", style="bold")
    if differs == (*place, len(step.completion_ids)):
        yield Text(f"{'':>16}the end: {mark.strip().removeprefix('<- ')}", style="bold")


def _numbers(per_trajectory: Sequence[Sequence[Any]], at: int, position: int) -> Any:
    if at >= len(per_trajectory) or position >= len(per_trajectory[at]):
        return None
    return per_trajectory[at][position]


def _at(numbers: Any, position: int) -> float | None:
    return None if numbers is None else float(numbers[position])


def _text(token: int, texts: Mapping[int, str]) -> str:
    return quoted(texts[token]) if token in texts else ABSENT

"""Finds in a run's recorded answers the cause of a problem that the metrics leave open."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rllm_core.algorithms.samples import segments
from rllm_core.errors import RunError
from rllm_core.run_folder.recorded import group_at, index_of, texts_of_tokens
from rllm_core.types import FinishReason, Step, Trajectory

MIN_ANSWERS = 4
READ_GROUPS = 16
MIN_CHARACTERS = 3  # a shorter expected answer may start another one by chance
REPEATS = 3
MIN_REPEATED_CHARACTERS = 12
LAST_CHARACTERS = 400
_CONTROL = re.compile(r"<[^\w\s/<>][^<>\s]*[^\w\s/<>]>|</?s>|<(?:bos|eos|pad|unk|(?:start|end)_of_\w+)>")
# Markers of reasoning and tool calls are part of an answer.
_ANSWER_MARKERS = re.compile("think|reason|tool|function|call|channel|message", re.IGNORECASE)
_REPEATED = re.compile(rf"(\S(?:.{{0,80}}?\S)?)(?:\s*\1){{{REPEATS - 1},}}\s*\S{{0,80}}\Z", re.DOTALL)


@dataclass
class AnswerCounts:
    """Counts of the recorded answers of a run.

    Attributes:
        all: Number of answers.
        empty: Answers without text.
        with_markers: Answers that continue after a control token that separates messages.
        cut_off: Answers that were truncated at the token limit.
        past_end: Truncated answers that continue after the expected answer, or repeat themselves.
        markers: Number of answers with each of these control tokens.
        ends_of_cut_off: Number of truncated answers by the first control token in them that the prompt has, too.
        conversations: Conversations of trajectories that have several.
        with_history: Conversations that start with answers in words that the policy did not sample.
    """

    all: int = 0
    empty: int = 0
    with_markers: int = 0
    cut_off: int = 0
    past_end: int = 0
    markers: Counter[str] = field(default_factory=Counter)
    ends_of_cut_off: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    with_history: int = 0

    def add(self, step: Step, texts: Mapping[int, str], expected: object) -> None:
        """Counts an answer; ``expected`` is the task's answer, or another type if the task has none."""
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        tokens = [texts.get(token, "") for token in step.completion_ids.tolist()]
        written = tokens if is_cut_off else tokens[:-1]  # without the stop token
        markers = [one for one in written if _is_marker(one)]
        self.all += 1
        self.empty += not step.text.strip() and not step.response.get("tool_calls") and not is_cut_off
        self.with_markers += bool(markers)
        self.markers.update(set(markers))
        if is_cut_off:
            self.cut_off += 1
            of_template = {texts.get(token, "") for token in step.prompt_ids.tolist()}
            self.ends_of_cut_off.update(one for one in markers[:1] if one in of_template)
            self.past_end += _is_past_end("".join(written), expected)

    def add_conversations(self, steps: Sequence[Step]) -> None:
        """Counts a trajectory's conversations, and how they start."""
        first = [steps[positions[0]] for positions in segments(steps)]
        begun = [one for one in first if not any(one.continues(other) for other in steps)]  # others are branches
        if len(begun) > 1:
            self.conversations += len(begun)
            self.with_history += sum(any(said["role"] == "assistant" for said in one.messages) for one in begun)

    @property
    def repeats_history(self) -> bool:
        """Whether many conversations start with answers, as they do with an agent that rewrites its history."""
        return self.conversations > 0 and self.with_history >= self.conversations / 3

    @property
    def is_of_another_template(self) -> bool:
        """Whether most answers are not answers at all, as from a model prompted in a template that it does not know."""
        return self.all >= MIN_ANSWERS and self.empty + self.with_markers >= self.all / 2

    @property
    def end_that_is_no_stop(self) -> str | None:
        """Returns the control token after which most truncated answers continue, or None."""
        [(name, count)] = self.ends_of_cut_off.most_common(1) or [("", 0)]
        return name if self.cut_off >= MIN_ANSWERS and count >= self.cut_off / 2 else None

    @property
    def never_stops(self) -> bool:
        """Whether many truncated answers contain the expected answer and continue, or repeat themselves."""
        return self.cut_off >= MIN_ANSWERS and self.past_end >= self.cut_off / 3


def of_folder(run: Path) -> AnswerCounts:
    """Reads a run's last recorded answers; none if it recorded none, or its files are damaged."""
    found = AnswerCounts()
    try:
        texts = texts_of_tokens(run)
        for trajectory, expected in _trajectories(run):
            found.add_conversations(trajectory.steps)
            for step in trajectory.steps:
                found.add(step, texts, expected)
    except (RunError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return AnswerCounts()
    return found


def _trajectories(run: Path) -> Iterator[tuple[Trajectory, Any]]:
    for entry in islice(reversed(index_of(run)), READ_GROUPS):
        group = group_at(run, entry)
        for rollout in group.rollouts:
            for trajectory in rollout.episode.trajectories:
                yield trajectory, group.task.data.get("answer")


def _is_marker(token: str) -> bool:
    return _CONTROL.fullmatch(token) is not None and not _ANSWER_MARKERS.search(token)


def _is_past_end(text: str, expected: object) -> bool:
    text = text.strip()
    wanted = str(expected).strip() if isinstance(expected, str | int | float) else ""
    following = text.removeprefix(wanted) if wanted else text
    if following != text and following and (len(wanted) >= MIN_CHARACTERS or not following[0].isalnum()):
        return True
    repeated = _REPEATED.search(text[-LAST_CHARACTERS:])
    return repeated is not None and len(repeated[0]) >= MIN_REPEATED_CHARACTERS

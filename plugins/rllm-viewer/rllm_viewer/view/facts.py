"""Facts about each rollout, read from a line of ``groups.jsonl``, by which the viewer lists and filters groups.

It decodes only the fields that it needs, so that indexing a long run takes seconds.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from rllm_core.tokens import unpacked
from rllm_core.types import FinishReason

_BYTES = {"<u1": 1, "<u2": 2, "<i4": 4, "<f4": 4}


class ListedRollout(msgspec.Struct, omit_defaults=True):
    """One rollout in a list.

    Attributes:
        index: Index among the rollouts of its group.
        end: Its `rllm_core.types.TerminationReason`.
        outcome: ``trained``, ``filtered``, ``failed`` or ``validation``.
        tokens: Number of sampled tokens.
        breaks: Reasons for its segment breaks.
        cut: Whether a completion was truncated at the token limit.
        tools: Names of the tools it called.
        versions: Oldest and latest weight version that sampled it; empty if the policy sampled none of it.
        advantage: Mean advantage of the trained tokens, or None.
        answered: Whether its last text contains the ``answer`` in the task's data; None if there is none.
    """

    index: int
    reward: float | None
    solved: bool | None
    end: str
    outcome: str
    reason: str
    turns: int
    tokens: int
    roles: list[str]
    breaks: list[str] = []
    cut: bool = False
    tools: list[str] = []
    versions: list[int] = []
    advantage: float | None = None
    answered: bool | None = None


class ListedGroup(msgspec.Struct):
    """One group in a list; ``rollouts`` is None while only its index entry is known.

    Attributes:
        id: Position of its line in ``groups.jsonl``, in bytes.
        length: Length of the line in bytes, without the newline.
        solved: ``(rollouts,)`` likewise, see `rllm_core.run_folder.recorded.IndexedGroup`.
    """

    id: int
    length: int
    step: int
    group: int | None
    task: str
    kept: str
    outcome: str
    reason: str
    rewards: list[float | None]
    solved: list[bool | None]
    rollouts: list[ListedRollout] | None = None


class IndexEntry(msgspec.Struct):
    """A line of ``groups_index.jsonl``."""

    offset: int
    length: int
    step: int
    group: int | None
    task: str
    kept: str
    outcome: str
    reason: str
    rewards: list[float | None]
    solved: list[bool | None]

    def row(self) -> ListedGroup:
        """Returns the group as a row without facts about its rollouts."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "offset"}
        return ListedGroup(id=self.offset, **fields)


class _Function(msgspec.Struct):
    name: str = ""


class _Call(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Response(msgspec.Struct):
    tool_calls: list[_Call] | None = None
    content: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # most of the line, but rarely needed


class _Step(msgspec.Struct):
    completion_ids: str | list[int]
    response: _Response = msgspec.field(default_factory=_Response)
    finish_reason: str = "stop"
    weight_version: int | msgspec.UnsetType | None = msgspec.UNSET
    break_reason: str | None = None
    reward: float | None = None
    token_rewards: Any = None


class _Trajectory(msgspec.Struct):
    steps: list[_Step] = []
    role: str = "agent"
    reward: float | None = None
    trainable: bool = True


class _Episode(msgspec.Struct):
    trajectories: list[_Trajectory] = []
    rollout_index: int = 0
    is_correct: bool | None = None
    termination_reason: str = "done"


class _Rollout(msgspec.Struct):
    episode: _Episode
    outcome: str | None = None
    reason: str | None = None
    advantages: list[list[float | str | None]] = []


class _Data(msgspec.Struct):
    answer: Any = None


class _Task(msgspec.Struct):
    task_id: str
    data: _Data = msgspec.field(default_factory=_Data)


class _Line(msgspec.Struct):
    step: int
    group: int | None
    kept: str
    outcome: str
    reason: str
    weight_version: int | None
    task: _Task
    rollouts: list[_Rollout]


_DECODER = msgspec.json.Decoder(_Line)
ENTRIES = msgspec.json.Decoder(IndexEntry)


def of_line(line: bytes, offset: int) -> ListedGroup:
    """Returns the row of a group.

    Raises:
        ValueError: If the line is damaged.
    """
    read = _DECODER.decode(line)
    rollouts = [_facts(one, read) for one in read.rollouts]
    return ListedGroup(
        offset,
        len(line),
        read.step,
        read.group,
        read.task.task_id,
        read.kept,
        read.outcome,
        read.reason,
        [one.reward for one in rollouts],
        [one.solved for one in rollouts],
        rollouts,
    )


def _facts(read: _Rollout, group: _Line) -> ListedRollout:
    episode = read.episode
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    rewards = [r for r in (_reward(each) for each in episode.trajectories if each.trainable) if r is not None]
    versions = [group.weight_version if step.weight_version is msgspec.UNSET else step.weight_version for step in steps]
    known = [version for version in versions if isinstance(version, int)]
    calls = [call.function.name for step in steps for call in step.response.tool_calls or ()]
    return ListedRollout(
        index=episode.rollout_index,
        reward=fmean(rewards) if rewards else None,
        solved=episode.is_correct,
        end=episode.termination_reason,
        outcome=read.outcome or group.outcome,
        reason=read.reason or group.reason,
        turns=len(steps),
        tokens=sum(_length(step.completion_ids) for step in steps),
        roles=list(dict.fromkeys(trajectory.role for trajectory in episode.trajectories)),
        breaks=[step.break_reason for step in steps if step.break_reason is not None],
        cut=any(step.finish_reason == FinishReason.LENGTH.value for step in steps),
        tools=list(dict.fromkeys(calls)),
        versions=[min(known), max(known)] if known else [],
        advantage=_mean(read),
        answered=_has_answer(steps, group.task.data.answer),
    )


def _has_answer(steps: list[_Step], answer: Any) -> bool | None:
    """Returns whether the last text of a rollout contains the task's answer as separate words."""
    wanted = str(answer).strip() if isinstance(answer, str | int | float) else ""
    if not wanted or not steps or not bytes(steps[-1].response.content):
        return None
    said = msgspec.json.decode(steps[-1].response.content)
    if not isinstance(said, str):
        return None
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", said, re.IGNORECASE) is not None


def _reward(trajectory: _Trajectory) -> float | None:
    """Returns the total reward, like `rllm_core.types.Trajectory.total_reward`; None without any."""
    of_tokens = [_sum(step.token_rewards, step) for step in trajectory.steps if step.token_rewards is not None]
    of_steps = [step.reward for step in trajectory.steps if step.reward is not None]
    if trajectory.reward is not None:
        return trajectory.reward + sum(of_tokens)
    return sum(of_steps) + sum(of_tokens) if of_steps or of_tokens else None


def _sum(written: Any, step: _Step) -> float:
    if isinstance(written, float):
        return written * _length(step.completion_ids)
    return float(np.sum(unpacked(written) if isinstance(written, str) else written))


def _mean(read: _Rollout) -> float | None:
    """Returns the mean over the trained tokens, or None."""
    total, count = 0.0, 0
    for trajectory, of_steps in zip(read.episode.trajectories, read.advantages, strict=False):
        for step, numbers in zip(trajectory.steps, of_steps, strict=False):
            if numbers is not None:
                length = _length(step.completion_ids)
                total += float(unpacked(numbers).sum()) if isinstance(numbers, str) else numbers * length
                count += length
    return total / count if count else None


def _length(written: str | list[int]) -> int:
    """Returns the number of packed ids, without unpacking them."""
    if isinstance(written, list):
        return len(written)
    kind, _, content = written.partition(":")
    return (len(content) // 4 * 3 - content[-2:].count("=")) // _BYTES[kind]


class _Owner(msgspec.Struct):
    rollout_id: str = ""


class _OwnerOfRollout(msgspec.Struct):
    episode: _Owner


class _Owners(msgspec.Struct):
    rollouts: list[_OwnerOfRollout]


_OWNERS = msgspec.json.Decoder(_Owners)


def rollout_ids(line: bytes) -> list[str]:
    """Returns the ids of the rollouts of a group.

    Raises:
        ValueError: If the line is damaged.
    """
    return [rollout.episode.rollout_id for rollout in _OWNERS.decode(line).rollouts]

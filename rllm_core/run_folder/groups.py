"""Groups as lines of ``groups.jsonl``: all rollouts of a task, and which parts of them were trained.

A line leaves out everything that its reader can restore: fields with their default value, the prompt that rollouts
share, and the part of a conversation that a step continues. Token ids and other numbers are packed
(`rllm_core.tokens.packed`), and all values of tokens but the advantages are compressed together
(`rllm_core.run_folder.token_values`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from pydantic_core import PydanticUndefined, to_json

from rllm_core.records import Record
from rllm_core.run_folder.token_values import read_values, written_values
from rllm_core.step_differences import differences
from rllm_core.tokens import packed, starts_with, unpacked
from rllm_core.types import Episode, Floats, Step, Task, TokenIds, Trajectory

_PACKED = frozenset(("prompt_ids", "completion_ids", "logprobs"))

SHARED_FIELDS = ("messages", "tools", "prompt_ids", "prompt_media")
"""Fields of a conversation's first step that rollouts of a group usually share."""

RULES = ("first", "best", "worst", "divided")
"""Rules that take turns in choosing the groups to record: oldest, highest and lowest mean reward, largest spread."""

MEASURES = ("advantages", "corrections", "trainer_logprobs", "entropies")
"""Names of the per-token values that a rollout may have for its trained tokens."""

_OF_GROUP = MEASURES[1:]  # written once for the group; most advantages are a single number per step

PerStep = Sequence[Floats | None]
"""Values of shape ``(completion_tokens,)`` for each step of a trajectory; None for a step that was not trained."""

Rewards = Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout of a recorded group.

    Attributes:
        outcome: ``trained``, ``filtered``, ``failed`` or ``validation``.
        reason: Reason of the outcome, as in the rollout accounting.
        advantages: Advantages used in training, per trajectory and step; empty if nothing was trained.
        corrections: Weights of the off-policy corrections, per trajectory and step; empty without corrections.
        trainer_logprobs: Log-probabilities under the weights before the optimizer step, per trajectory and step; empty
            if the backend did not compute them.
        entropies: Entropies under the same weights, in the same form.
    """

    episode: Episode
    outcome: str
    reason: str
    advantages: Sequence[PerStep] = ()
    corrections: Sequence[PerStep] = ()
    trainer_logprobs: Sequence[PerStep] = ()
    entropies: Sequence[PerStep] = ()

    @property
    def reward(self) -> float | None:
        """Reward of its episode."""
        return self.episode.reward


@dataclass(frozen=True)
class RecordedGroup:
    """The rollouts of one task, as a run recorded them.

    Attributes:
        step: Optimizer step that trained the group, or after which it was filtered or validated.
        group: Position of the task in the run's task stream; None in a validation.
        kept: Why this group was recorded, such as ``best``.
        weight_version: Oldest weight version that sampled any of the group's tokens, or None.
    """

    step: int
    group: int | None
    task: Task
    kept: str
    outcome: str
    reason: str
    weight_version: int | None
    rollouts: Sequence[RecordedRollout] = field(default_factory=tuple)

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of the rollouts that have one, or None."""
        return mean([rollout.reward for rollout in self.rollouts])

    def to_json(self) -> str:
        """Returns the line of the group, for `from_json`."""
        line = _Line(self.task.task_id, self.weight_version)
        rollouts = []
        for rollout in self.rollouts:
            row: dict[str, Any] = {}
            if (rollout.outcome, rollout.reason) != (self.outcome, self.reason):
                row |= {"outcome": rollout.outcome, "reason": rollout.reason}
            row["episode"] = line.of_episode(rollout.episode)
            if rollout.advantages:
                row["advantages"] = [[_numbers(of_step) for of_step in each] for each in rollout.advantages]
            rollouts.append(row)
        head = {name: getattr(self, name) for name in ("step", "group", "kept", "outcome", "reason", "weight_version")}
        task = {"task_id": self.task.task_id, "data": self.task.data}
        content = {**head, "task": task, "rollouts": rollouts}
        if values := _values(self.rollouts):
            content["values"] = values
        return to_json(content).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> RecordedGroup:
        """Restores a group from its line.

        Raises:
            ValueError: If the line is damaged.
        """
        written = json.loads(text)
        task = Task(**written["task"])
        line = _Line(task.task_id, written["weight_version"])
        shared = {"outcome": written["outcome"], "reason": written["reason"]}
        rollouts = [_rollout(shared | row, line) for row in written.pop("rollouts")]
        if values := written.pop("values", None):
            rollouts = _with_values(rollouts, values)
        return cls(**written | {"task": task, "rollouts": rollouts})


def chosen(rewards: Rewards, among: int, groups: int, turn: int) -> list[tuple[int, str]]:
    """Chooses the groups of a step to record.

    Args:
        rewards: Function that returns the rewards of the trajectories of the group at a position, if it has any. Called
            only if a rule needs them, and at most once per group.
        among: Number of groups in the step.
        groups: Number of groups to choose.
        turn: Number of the step; the rules continue where they stopped in the previous step.

    Returns:
        Position and rule of each chosen group. Ties go to the first group, and no group is chosen twice.
    """
    left = list(range(among))
    of_group = cache(rewards)
    result = []
    for number in range(turn * groups, turn * groups + min(groups, among)):
        rule = RULES[number % len(RULES)]
        rewarded = [position for position in left if of_group(position)] if rule != "first" else []
        if not rewarded:
            rule, position = "first", left[0]
        elif rule == "best":
            position = max(rewarded, key=lambda at: _mean(of_group(at)))
        elif rule == "worst":
            position = min(rewarded, key=lambda at: _mean(of_group(at)))
        else:
            position = max(rewarded, key=lambda at: _variance(of_group(at)))
        left.remove(position)
        result.append((position, rule))
    return result


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # exactly rounded, so that `rllm-core verify` finds the same ties


def _variance(values: Sequence[float]) -> float:
    center = _mean(values)
    return math.fsum((value - center) ** 2 for value in values) / len(values)


@dataclass
class _Line:
    """Writes and restores the episodes of one line, which leave out shared fields.

    Attributes:
        first: First step of each trajectory number, from the first episode that has such a trajectory.
    """

    task_id: str
    weight_version: int | None
    first: dict[int, Step] = field(default_factory=dict)
    _ids: dict[int, TokenIds] = field(default_factory=dict)

    def of_episode(self, episode: Episode) -> dict[str, Any]:
        """Returns the episode as JSON data."""
        left_out = ("trajectories", "task_id") if episode.task_id == self.task_id else ("trajectories",)
        fields = _fields(episode, left_out)
        fields["trajectories"] = trajectories = []
        for number, trajectory in enumerate(episode.trajectories):
            row = _fields(trajectory, ("steps",))
            row["steps"] = [
                self._of_step(step, before, continued, self._shared(number, step) if before is None else ())
                for step, before, continued in _with_continuations(trajectory)
            ]
            trajectories.append(row)
        return fields

    def _shared(self, number: int, opening: Step) -> Sequence[str]:
        """Returns the fields of a trajectory's first step that an earlier episode has already written."""
        earlier = self.first.get(number)
        if earlier is None:
            self.first[number], self._ids[number] = opening, opening.prompt_ids
            return ()
        return SHARED_FIELDS if _same_prompt(earlier, self._ids[number], opening) else ()

    def _of_step(
        self, step: Step, before: Step | None, continued: Mapping[str, Any], shared: Sequence[str]
    ) -> dict[str, Any]:
        fields = _fields(step, ("weight_version", *continued, *shared))
        if step.weight_version != self.weight_version:
            fields["weight_version"] = step.weight_version
        if "response" in fields:
            others = dict(step.response)
            role = others.pop("role", None)
            fields["response"] = others if role == "assistant" else {**others, "role": role}
        if before is not None and before.tools and not step.tools:
            fields["tools"] = []
        for name, difference in continued.items():
            new = difference["new"]
            if name == "tools":
                continue
            if name == "prompt_ids":
                fields[name] = f"+{packed(new)}"
            elif before is not None and new and new[0] == before.response:
                fields[name] = {"answered": list(new[1:])}
            else:
                fields[name] = {"added": list(new)}
        return fields

    def episode(self, written: dict[str, Any]) -> Episode:
        """Inverts `of_episode`."""
        written.setdefault("task_id", self.task_id)
        for number, trajectory in enumerate(written["trajectories"]):
            before: dict[str, Any] | None = None
            for step in trajectory["steps"]:
                if before is None and "prompt_ids" not in step:
                    step |= {name: getattr(self.first[number], name) for name in SHARED_FIELDS}
                self._restore(step, before)
                before = step
        episode = Episode.model_validate(written)
        for number, restored in enumerate(episode.trajectories):
            if restored.steps:
                self.first.setdefault(number, restored.steps[0])
        return episode

    def _restore(self, step: dict[str, Any], before: dict[str, Any] | None) -> None:
        """Restores the fields of a step for `rllm_core.types.Step`."""
        step.setdefault("weight_version", self.weight_version)
        if "response" in step:
            step["response"] = {"role": "assistant", **step["response"]}
            if step["response"]["role"] is None:
                del step["response"]["role"]
        if isinstance(step["prompt_ids"], str) and step["prompt_ids"].startswith("+"):
            step["prompt_ids"] = {"continues": True, "new": unpacked(step["prompt_ids"][1:])}
        messages = step.get("messages")
        if isinstance(messages, dict):
            said = [before["response"], *messages["answered"]] if before and "answered" in messages else None
            step["messages"] = {"continues": True, "new": messages["added"] if said is None else said}
        if before is not None:
            step.setdefault("tools", before.get("tools", ()))
        for name in ("advantages", "token_rewards"):
            if isinstance(step.get(name), float):
                step[name] = _of_tokens(step[name], unpacked(step["completion_ids"]).size)


def _rollout(row: Mapping[str, Any], line: _Line) -> RecordedRollout:
    episode = line.episode(row["episode"])
    numbers = {name: _per_step(row[name], episode) for name in MEASURES if name in row}
    return RecordedRollout(episode, row["outcome"], row["reason"], **numbers)


def _values(rollouts: Sequence[RecordedRollout]) -> dict[str, Any] | None:
    names = [name for name in _OF_GROUP if any(getattr(rollout, name) for rollout in rollouts)]
    if not names:
        return None
    return written_values({name: _of_steps(rollouts, name) for name in names}, _steps(rollouts), _trained(rollouts))


def _with_values(rollouts: Sequence[RecordedRollout], written: Mapping[str, Any]) -> list[RecordedRollout]:
    """Inverts `_values`."""
    found = read_values(written, _steps(rollouts), _trained(rollouts))
    values = {name: iter(found[name]) for name in _OF_GROUP if name in found}
    result = []
    for rollout in rollouts:
        of_rollout = {
            name: [[next(each) for _ in trajectory.steps] for trajectory in rollout.episode.trajectories]
            for name, each in values.items()
        }
        known: dict[str, Any] = {
            name: each
            for name, each in of_rollout.items()
            if rollout.advantages or any(value is not None for of_steps in each for value in of_steps)
        }
        result.append(replace(rollout, **known))
    return result


def _steps(rollouts: Sequence[RecordedRollout]) -> list[Step]:
    return [step for rollout in rollouts for trajectory in rollout.episode.trajectories for step in trajectory.steps]


def _trained(rollouts: Sequence[RecordedRollout]) -> list[int]:
    """Returns the positions of the steps with advantages among those of the group."""
    return [at for at, advantages in enumerate(_of_steps(rollouts, "advantages")) if advantages is not None]


def _of_steps(rollouts: Sequence[RecordedRollout], name: str) -> list[Floats | None]:
    values: list[Floats | None] = []
    for rollout in rollouts:
        if numbers := getattr(rollout, name):
            for of_trajectory in numbers:
                values += of_trajectory
        else:
            values += [None] * sum(len(trajectory.steps) for trajectory in rollout.episode.trajectories)
    return values


def _with_continuations(trajectory: Trajectory) -> Iterable[tuple[Step, Step | None, Mapping[str, Any]]]:
    if len(trajectory.steps) == 1:  # fast path: such calls dominate the time that short rollouts take
        return [(trajectory.steps[0], None, {})]
    before: Sequence[Step | None] = [None, *trajectory.steps]
    return zip(trajectory.steps, before, differences(trajectory.steps), strict=False)


def _same_prompt(one: Step, ids: TokenIds, other: Step) -> bool:
    others = other.prompt_ids
    return (
        len(ids) == len(others)
        and starts_with(ids, others)
        and one.prompt_media == other.prompt_media
        and one.messages == other.messages
        and one.tools == other.tools
    )


def _fields(record: Record, left_out: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields that differ from their default, as JSON data."""
    written: dict[str, Any] = {}
    stored = record.__dict__
    for name, default in _defaults(type(record), left_out):
        value = stored[name]
        if value is default:
            continue
        if name in _PACKED:
            written[name] = packed(getattr(record, name))  # a field of ids may store a span
        elif type(value) is np.ndarray:
            written[name] = _numbers(value)
        elif value != default:
            written[name] = [one.model_dump() for one in value] if name == "prompt_media" else value
    if "messages" in written:
        written["messages"] = list(written["messages"])
    return written


@cache
def _defaults(kind: type[Record], left_out: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    if left_out:
        return [(name, default) for name, default in _defaults(kind) if name not in left_out]
    found = [(name, one.get_default(call_default_factory=True)) for name, one in kind.model_fields.items()]
    return [(name, None if value is PydanticUndefined else value) for name, value in found]


def _numbers(array: Floats | None) -> Any:
    """Returns a single number if all are equal, otherwise the packed array."""
    if array is None:
        return None
    if array.size and (array.strides == (0,) or _is_uniform(array)):
        return float(str(array[0]))  # the fewest digits that restore a float32
    return packed(array)


def _is_uniform(array: Floats) -> bool:
    # Most arrays differ at their ends; argmin and argmax avoid the setup cost of a reduction.
    return array.item(0) == array.item(-1) and array.item(array.argmin()) == array.item(array.argmax())


def _per_step(written: Sequence[Sequence[Any]], episode: Episode) -> list[PerStep]:
    return [
        [_of_tokens(number, len(step.completion_ids)) for number, step in zip(numbers, trajectory.steps, strict=True)]
        for numbers, trajectory in zip(written, episode.trajectories, strict=True)
    ]


def _of_tokens(written: Any, tokens: int) -> Any:
    if written is None or isinstance(written, str):
        return None if written is None else unpacked(written)
    return np.full(tokens, written, np.float32)

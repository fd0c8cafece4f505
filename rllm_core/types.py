"""Data types that cross the boundary between the core and plugins.

From small to large:

* a **token id** is an ``int >= 0``; sequences of them are read-only ``int32`` arrays of shape ``(tokens,)``
  (`rllm_core.tokens`);
* a **message** is a frozen dictionary (``role``, ``content``, ...); `Messages` is a list of them
  (`rllm_core.messages`);
* a **step** is one model call: the exact prompt, the exact completion, their log-probabilities (natural log)
  and the weight version that sampled them;
* a **trajectory** is the steps of one role in one rollout, with a reward;
* an **episode** is the record of a rollout: its trajectories and the reason it ended;
* a **trajectory group** is the trajectories of one task and role, which the advantage compares with each other;
* a **training sample** is one unbroken segment of a trajectory, ready for a backend.

Records are validated when they are built and when a field is assigned. They survive ``to_json`` / ``from_json``,
pickling and deep copies without loss. Text is Unicode: half a surrogate pair is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from rllm_core.media import MediaChunk, PlacedMedia, TokenInput, text_only, with_media
from rllm_core.messages import (
    FrozenDict,
    FrozenList,
    JsonDict,
    JsonList,
    Message,
    MessageLike,
    Messages,
    MessageView,
    MessageViewField,
    SampledMessage,
    freeze,
    message,
    snapshot,
    thaw,
    well_formed,
)
from rllm_core.records import Count, Flag, Name, Record, Reward, check_lengths, new_id
from rllm_core.sampling import FinishReason, ModelOutput, SamplingParams, TokenOutput
from rllm_core.step_differences import differences, restored
from rllm_core.termination import TerminationReason
from rllm_core.tokens import (
    AdvantagesField,
    Floats,
    LogprobsField,
    SpanField,
    TokenIds,
    TokenIdsField,
    TokenLog,
    TokenRewardsField,
    TokenSpanField,
    is_id_array,
    logprobs,
    starts_with,
    token_ids,
)

__all__ = [
    "Count",
    "Episode",
    "FinishReason",
    "Floats",
    "FrozenDict",
    "FrozenList",
    "SampledMessage",
    "JsonDict",
    "JsonList",
    "MediaChunk",
    "Message",
    "MessageLike",
    "MessageView",
    "Messages",
    "ModelOutput",
    "Name",
    "PlacedMedia",
    "Record",
    "Reward",
    "SamplingParams",
    "Step",
    "Task",
    "TerminationReason",
    "TokenIds",
    "TokenInput",
    "TokenLog",
    "TokenOutput",
    "TrainingSample",
    "Trajectory",
    "TrajectoryGroup",
    "freeze",
    "is_id_array",
    "logprobs",
    "message",
    "new_id",
    "snapshot",
    "starts_with",
    "text_only",
    "thaw",
    "token_ids",
    "well_formed",
    "with_media",
]


class Task(Record):
    """One problem: an id that is stable between runs, and data that the workflow has validated."""

    task_id: Name
    data: JsonDict = Field(default_factory=FrozenDict)


class Step(Record):
    """One model call in a trajectory.

    Attributes:
        messages: Conversation before the completion, as it was at the time of the call.
        response: Assistant message parsed from the completion (for people and for the next turn).
        tools: Tools that the prompt offered, as the workflow gave them; empty if it offered none.
        prompt_ids: ``(prompt_tokens,)`` exactly as sent.
        prompt_media: Media in the prompt, such as images; ``prompt_ids`` holds placeholders for them.
        completion_ids: ``(completion_tokens,)`` exactly as sampled.
        logprobs: ``(completion_tokens,)`` natural-log probabilities from the engine, or None if unknown.
        weight_version: Weight version that sampled the completion, or None if the policy did not sample it.
        segment: Number of the unbroken token sequence this step belongs to (see `rllm_core.parser.ParserSession`).
        break_reason: Why a new segment starts here. Set on a segment's first step only.
        control_tokens: How often new text in the prompt spells a control token (see
            `rllm_core.parser.BaseParser.count_control_tokens`).
        reward: Reward of this step, or None if the environment rewards whole trajectories.
        token_rewards: ``(completion_tokens,)`` rewards of single tokens, added to all others, or None.
        advantages: ``(completion_tokens,)`` advantages computed outside the estimators, for estimators that use them
            unchanged.
    """

    step_id: Name = Field(default_factory=new_id)
    messages: MessageViewField = Field(default_factory=MessageView)
    response: JsonDict = Field(default_factory=FrozenDict)
    tools: JsonList = Field(default_factory=FrozenList)
    prompt_ids: TokenSpanField
    prompt_media: tuple[PlacedMedia, ...] = ()
    completion_ids: TokenSpanField
    logprobs: LogprobsField | None = None
    finish_reason: FinishReason = FinishReason.STOP
    weight_version: Count | None = None
    segment: Count = 0
    break_reason: str | None = None
    control_tokens: Count = 0
    reward: Reward | None = None
    token_rewards: TokenRewardsField | None = None
    advantages: AdvantagesField | None = None
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        given = {"log-probabilities": self.logprobs, "token rewards": self.token_rewards, "advantages": self.advantages}
        check_lengths(self.completion_tokens, "tokens", given, owner=f"step {self.step_id}: ")
        return self

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.__dict__["prompt_ids"])

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in the completion."""
        return len(self.__dict__["completion_ids"])

    def continues(self, before: Step) -> bool:
        """Whether the prompt starts, token for token, with the prompt and the completion of ``before``."""
        cut = len(before.prompt_ids)
        return starts_with(self.prompt_ids, before.prompt_ids) and starts_with(
            self.prompt_ids[cut:], before.completion_ids
        )

    @property
    def text(self) -> str:
        """Text of the response, for graders and people; "" if there is none."""
        content = self.response.get("content")
        return content if isinstance(content, str) else ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        yield from self._fields().items()


for _name in ("prompt_ids", "completion_ids"):
    setattr(Step, _name, SpanField(_name))


class Trajectory(Record):
    """The steps of one role in one rollout.

    Attributes:
        role: Name of the role. A task's trajectories are compared within a role. Single-agent workflows have one role,
            ``"agent"``.
        reward: Reward of the whole trajectory. None means the sum of its steps' rewards.
        trainable: Whether to train the trajectory. False for roles that are only recorded.
    """

    role: Name = "agent"
    steps: list[Step] = Field(default_factory=list)
    reward: Reward | None = None
    trainable: Flag = True
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @property
    def has_reward(self) -> bool:
        """Whether any reward is set, so that `total_reward` is defined."""
        return self.reward is not None or any(s.reward is not None or s.token_rewards is not None for s in self.steps)

    @property
    def total_reward(self) -> float:
        """The trajectory's reward, or else the sum of its steps' rewards; plus all token rewards.

        Raises:
            ValueError: If no reward is set. A missing reward is not a reward of 0.
        """
        of_tokens = []
        for step in self.steps:  # no comprehension: it would take as long as everything else here
            if step.token_rewards is not None:
                of_tokens.append(float(step.token_rewards.sum()))
        if self.reward is not None:
            return self.reward + sum(of_tokens)
        rewards = [step.reward for step in self.steps if step.reward is not None]
        if not rewards and not of_tokens:
            raise ValueError(f"trajectory of role {self.role!r} has no reward; set one on the trajectory or its steps")
        return float(sum(rewards) + sum(of_tokens))

    @field_serializer("steps")
    def _write_steps(self, steps: list[Step]) -> list[dict[str, Any]]:
        written = []
        for step, continued in zip(steps, differences(steps), strict=True):
            for difference in continued.values():
                new = difference["new"]
                difference["new"] = new.tolist() if isinstance(new, np.ndarray) else thaw(new)
            written.append(step.model_dump(exclude=set(continued)) | continued)
        return written

    def _fields(self) -> dict[str, Any]:
        pairs = zip(self.steps, differences(self.steps), strict=True)
        return super()._fields() | {"steps": [step._fields() | continued for step, continued in pairs]}

    @field_validator("steps", mode="before")
    @classmethod
    def _read_steps(cls, steps: Any) -> Any:
        if not isinstance(steps, list | tuple) or not any(isinstance(step, dict) for step in steps):
            return steps
        return restored(steps)


MAX_EPISODE_ERROR_CHARACTERS = 4_000


def _readable(error: Any) -> Any:
    if not isinstance(error, str):
        return error
    error = well_formed(error)
    if len(error) <= MAX_EPISODE_ERROR_CHARACTERS:
        return error
    cut = f" [{len(error):,} characters, cut here]"
    return error[: MAX_EPISODE_ERROR_CHARACTERS - len(cut)] + cut


class Episode(Record):
    """Record of one rollout of a task.

    Attributes:
        rollout_id: Opaque id, unique in a run. Filled in by the core.
        rollout_index: Index among the task's ``rollouts_per_group`` rollouts.
        is_correct: Whether the grader found the task solved, or None if this is not defined for the task.
        error: Type and message of the error, for failures only.
        metrics: Numbers to average over episodes.
    """

    task_id: Name
    rollout_id: str = ""
    rollout_index: Count = 0
    trajectories: list[Trajectory] = Field(default_factory=list)
    termination_reason: TerminationReason = TerminationReason.DONE
    is_correct: Flag | None = None
    is_validation: Flag = False
    error: Annotated[str | None, BeforeValidator(_readable)] = None
    metrics: dict[str, Reward] = Field(default_factory=dict)
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @property
    def weight_version(self) -> int | None:
        """Oldest weight version among its sampled steps."""
        versions = [s.weight_version for t in self.trajectories for s in t.steps if s.weight_version is not None]
        return min(versions, default=None)

    @property
    def reward(self) -> float | None:
        """Mean total reward of its trainable trajectories; None if they have none."""
        rewards = [t.total_reward for t in self.trajectories if t.trainable and t.has_reward]
        return fmean(rewards) if rewards else None


class TrajectoryGroup(Record):
    """Advantage group: trajectories of one task and role, which an advantage estimator compares with each other.

    Attributes:
        group_id: Position of the group in the run's task stream; unique in a run.
        rollout_ids: ``(trajectories,)`` ids of the rollouts they come from, in the same order.
        weight_version: Oldest weight version that sampled any of its tokens.
    """

    group_id: Count
    task_id: Name
    role: Name = "agent"
    trajectories: list[Trajectory]
    rollout_ids: list[str]
    weight_version: Count

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        check_lengths(len(self.trajectories), "trajectories", {"rollout ids": self.rollout_ids})
        return self


class TrainingSample(Record):
    """One unbroken segment of a trajectory: its tokens, and which of them the policy sampled.

    Only sampled tokens have a log-probability and an advantage. These arrays have one entry per sampled token, so there
    is nothing to pad.

    Attributes:
        token_ids: ``(tokens,)`` prompt, completions and observations in order.
        turn_spans: ``(turns, 2)`` start and stop of each sampled completion in ``token_ids``.
        logprobs: ``(sampled_tokens,)`` log-probabilities under the rollout policy.
        advantages: ``(sampled_tokens,)`` advantages.
        proximal_logprobs: ``(sampled_tokens,)`` log-probabilities under the policy before the step, if the run file
            requests them.
        proximal_fractions: ``(turns,)`` position of an interpolated proximal policy between the policy that sampled the
            turn (0) and the one in training (1), by weight versions.
        reference_logprobs: ``(sampled_tokens,)`` log-probabilities under the reference model, if the loss uses KL.
        media: Media such as images; ``token_ids`` holds placeholders for them.
        weight_versions: ``(turns,)`` weight version that sampled each turn.
    """

    sample_id: Name = Field(default_factory=new_id)
    group_id: Count
    rollout_id: str
    role: Name = "agent"
    token_ids: TokenIdsField
    turn_spans: tuple[tuple[Count, Count], ...]
    logprobs: LogprobsField | None
    advantages: AdvantagesField
    weight_versions: tuple[Count, ...]
    proximal_logprobs: LogprobsField | None = None
    proximal_fractions: AdvantagesField | None = None
    reference_logprobs: LogprobsField | None = None
    media: tuple[PlacedMedia, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        end = 0
        for start, stop in self.turn_spans:
            if not end <= start <= stop <= len(self.token_ids):
                raise ValueError(f"turn spans {self.turn_spans} do not fit {len(self.token_ids)} tokens in order")
            end = stop
        if self.turn_spans and self.turn_spans[0][0] == 0:
            raise ValueError("a sample cannot begin with a sampled token: there was no prompt")
        of_turns = {"weight versions": self.weight_versions, "proximal fractions": self.proximal_fractions}
        check_lengths(len(self.turn_spans), "turns", of_turns)
        of_sampled_tokens = {
            "log-probabilities": self.logprobs,
            "proximal log-probabilities": self.proximal_logprobs,
            "reference log-probabilities": self.reference_logprobs,
            "advantages": self.advantages,
        }
        check_lengths(self.sampled_tokens, "sampled tokens", of_sampled_tokens)
        return self

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(stop - start for start, stop in self.turn_spans)

    @property
    def prompt_tokens(self) -> int:
        """Length of the first prompt, which samples of a group usually share."""
        return self.turn_spans[0][0] if self.turn_spans else len(self.token_ids)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """``(tokens,)`` True exactly on sampled tokens."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, stop in self.turn_spans:
            mask[start:stop] = True
        return mask

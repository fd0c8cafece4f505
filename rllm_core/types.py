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

import itertools
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from rllm_core.messages import (
    FrozenDict,
    FrozenList,
    JsonDict,
    Message,
    MessageLike,
    Messages,
    MessageView,
    MessageViewField,
    SampledMessage,
    freeze,
    identical,
    message,
    snapshot,
    thaw,
    well_formed,
)
from rllm_core.records import Record
from rllm_core.tokens import (
    AdvantagesField,
    Floats,
    LogprobsField,
    TokenIds,
    TokenIdsField,
    TokenLog,
    TokenRewardsField,
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


Count = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]


def _number(value: Any) -> Any:
    """Converts ``value`` to a float: a bool to 0 or 1; numpy, torch and ``decimal`` numbers to their value.

    Raises:
        ValueError: If it is not a single finite number.
    """
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__") or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"expected a finite number or a bool, got {type(value).__name__} {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"expected a finite number, got an {type(value).__name__} too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


Reward = Annotated[float, BeforeValidator(_number)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


_ids = itertools.count()
_process = secrets.token_hex(8)


def _seed_ids() -> None:
    global _ids, _process
    _ids, _process = itertools.count(), secrets.token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_seed_ids)


def new_id() -> str:
    """Returns a new opaque id, unique in this process and distinguished from other processes' by 64 random bits."""
    return f"{next(_ids):012x}{_process}"


class MediaChunk(Record):
    """A non-text piece of a prompt, which occupies ``length_tokens`` positions.

    Text-only engines and parsers reject it up front, with a specific error (see `text_only`).

    Attributes:
        sha256: Hash of ``content``; identifies the chunk where the content is not available.
        kind: Kind of media, such as ``"image"``.
        length_tokens: Number of positions it occupies.
        content: The encoded file, shared in memory and never written to JSON. None if the record was read from JSON.
    """

    model_config = ConfigDict(frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    kind: Name
    length_tokens: Annotated[int, Field(strict=True, ge=1)]
    content: Annotated[bytes | None, Field(exclude=True, repr=False)] = None

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = ({**value.__dict__, "content": None} for value in (self, other))
        return bool(mine == theirs)

    def __hash__(self) -> int:
        return hash((self.sha256, self.kind, self.length_tokens))


class PlacedMedia(MediaChunk):
    """Media at a position of a prompt: placeholders fill ``[start, start + length_tokens)``."""

    start: Count

    @property
    def stop(self) -> int:
        """First position after the chunk."""
        return self.start + self.length_tokens


TokenInput = Sequence[int | MediaChunk] | TokenIds


def text_only(tokens: TokenInput, provider: str) -> TokenIds:
    """Returns ``tokens`` as an array of ids.

    Raises:
        ValueError: If they contain media; names ``provider``, which takes text only.
    """
    if not isinstance(tokens, np.ndarray):
        for token in tokens:
            if isinstance(token, MediaChunk):
                raise ValueError(f"{provider} takes text only, but the prompt holds a chunk of kind {token.kind!r}")
    return token_ids(tokens)  # type: ignore[arg-type]


def with_media(prompt_ids: TokenIds, media: Sequence[PlacedMedia]) -> TokenInput:
    """Returns a prompt as engines take it, with media chunks in place of their placeholders."""
    if not media:
        return prompt_ids
    mixed: list[int | MediaChunk] = []
    position = 0
    for piece in media:
        mixed += prompt_ids[position : piece.start].tolist()
        mixed.append(piece)
        position = piece.stop
    return [*mixed, *prompt_ids[position:].tolist()]


class TerminationReason(StrEnum):
    """Why a rollout ended. A failure is never a reward: none of its trajectories are trained."""

    DONE = "done"
    MAX_TURNS = "max_turns_exceeded"
    MAX_PROMPT_TOKENS = "max_prompt_tokens_exceeded"
    MAX_RESPONSE_TOKENS = "max_response_tokens_exceeded"
    TIMEOUT = "timeout"
    ENGINE_ERROR = "engine_error"
    ERROR = "error"
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """Whether the cause was infrastructure, a bug or a cancellation, rather than the policy."""
        return self in _FAILURES


_FAILURES = frozenset(
    {
        TerminationReason.TIMEOUT,
        TerminationReason.ENGINE_ERROR,
        TerminationReason.ERROR,
        TerminationReason.CANCELLED,
    }
)


class FinishReason(StrEnum):
    """Why a completion ended: a sampled stop token, the token limit, or an abort by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(Record):
    """Sampling parameters of one completion.

    Attributes:
        temperature: Divisor of the logits; 0 means greedy. Log-probabilities refer to the distribution after the
            temperature (without it when greedy) and *before* ``top_k`` and ``top_p``.
        top_p: Sample from the smallest set of tokens with at least this total probability.
        top_k: Sample from the k most likely tokens. 0 disables the limit.
        max_response_tokens: Maximum tokens of the completion, including the stop token.
        stop_token_ids: Tokens that end the completion when sampled. The completion includes the sampled one.
    """

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Count = 0
    max_response_tokens: Annotated[int, Field(strict=True, ge=1)] = 1024
    stop_token_ids: tuple[Count, ...] = ()

    def __hash__(self) -> int:
        return hash((self.temperature, self.top_p, self.top_k, self.max_response_tokens, self.stop_token_ids))


class _Sampled(Record):
    """Common fields of `TokenOutput` and `ModelOutput`."""

    logprobs: LogprobsField | None = None
    finish_reason: FinishReason
    weight_version: Count
    newest_weight_version: Count | None = None

    def _check_sampled(self, completion_ids: TokenIds) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(completion_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(completion_ids)} tokens")
        if self.newest_weight_version is not None and self.newest_weight_version < self.weight_version:
            raise ValueError(
                f"the newest weight version {self.newest_weight_version} is older than the oldest {self.weight_version}"
            )


class TokenOutput(_Sampled):
    """Completion exactly as an engine sampled it.

    Attributes:
        token_ids: ``(completion_tokens,)`` ids, including the stop token if one was sampled.
        logprobs: ``(completion_tokens,)`` log-probabilities, or None if the engine has none. Never padded.
        weight_version: Weight version that sampled it; the oldest one if the weights changed meanwhile.
        newest_weight_version: Newest weight version that sampled it, if different.
    """

    token_ids: TokenIdsField

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        self._check_sampled(self.token_ids)
        return self


class ModelOutput(_Sampled):
    """One completion, as tokens and as a message."""

    message: JsonDict
    prompt_ids: TokenIdsField
    prompt_media: tuple[PlacedMedia, ...] = ()
    completion_ids: TokenIdsField

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        self._check_sampled(self.completion_ids)
        return self


class Task(Record):
    """One problem: an id that is stable between runs, and data that the workflow has validated."""

    task_id: Name
    data: JsonDict = Field(default_factory=FrozenDict)


class Step(Record):
    """One model call in a trajectory.

    Attributes:
        messages: Conversation before the completion, as it was at the time of the call.
        response: Assistant message parsed from the completion (for people and for the next turn).
        prompt_ids: ``(prompt_tokens,)`` exactly as sent.
        prompt_media: Media in the prompt, such as images; ``prompt_ids`` holds placeholders for them.
        completion_ids: ``(completion_tokens,)`` exactly as sampled.
        logprobs: ``(completion_tokens,)`` natural-log probabilities from the engine, or None if unknown.
        weight_version: Weight version that sampled the completion, or None if the policy did not sample it.
        segment: Number of the unbroken token sequence this step belongs to (see `rllm_core.parser.ParserSession`).
        break_reason: Why a new segment starts here. Set on a segment's first step only.
        control_tokens: How often new text in its prompt spells a control token (see
            `rllm_core.parser.BaseParser.count_control_tokens`).
        reward: Reward of this step, or None if the environment rewards whole trajectories.
        token_rewards: ``(completion_tokens,)`` rewards of single tokens, added to all others, or None.
        advantages: ``(completion_tokens,)`` advantages computed outside the estimators, for estimators that use them
            unchanged.
    """

    step_id: Name = Field(default_factory=new_id)
    messages: MessageViewField = Field(default_factory=MessageView)
    response: JsonDict = Field(default_factory=FrozenDict)
    prompt_ids: TokenIdsField
    prompt_media: tuple[PlacedMedia, ...] = ()
    completion_ids: TokenIdsField
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
        tokens = len(self.completion_ids)
        for what, array in (
            ("log-probabilities", self.logprobs),
            ("token rewards", self.token_rewards),
            ("advantages", self.advantages),
        ):
            if array is not None and len(array) != tokens:
                raise ValueError(f"step {self.step_id}: {len(array)} {what} for {tokens} tokens")
        return self

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


class Trajectory(Record):
    """The steps of one role in one rollout.

    Attributes:
        role: Name of the role. A task's trajectories are compared within a role. Single-agent workflows have one role,
            ``"agent"``.
        reward: Reward of the whole trajectory. None means the sum of its steps' rewards.
        trainable: Whether to train it. False for roles that are only recorded.
    """

    role: Name = "agent"
    steps: list[Step] = Field(default_factory=list)
    reward: Reward | None = None
    trainable: Flag = True
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @property
    def has_reward(self) -> bool:
        """Whether any reward is set, so that `total_reward` is defined."""
        return self.reward is not None or any(
            step.reward is not None or step.token_rewards is not None for step in self.steps
        )

    @property
    def total_reward(self) -> float:
        """The trajectory's reward, or else the sum of its steps' rewards; plus all token rewards.

        Raises:
            ValueError: If no reward is set. A missing reward is not a reward of 0.
        """
        of_tokens = [float(step.token_rewards.sum()) for step in self.steps if step.token_rewards is not None]
        if self.reward is not None:
            return self.reward + sum(of_tokens)
        rewards = [step.reward for step in self.steps if step.reward is not None]
        if not rewards and not of_tokens:
            raise ValueError(f"trajectory of role {self.role!r} has no reward; set one on the trajectory or its steps")
        return float(sum(rewards) + sum(of_tokens))

    @field_serializer("steps")
    def _write_steps(self, steps: list[Step]) -> list[dict[str, Any]]:
        written = []
        for step, shared in zip(steps, _shared_prefixes(steps), strict=True):
            data = step.model_dump(exclude=set(shared))
            data.update({name: {"continues": True, "new": thaw(list(new))} for name, new in shared.items()})
            if "prompt_ids" in shared:
                data["prompt_ids"]["new"] = shared["prompt_ids"].tolist()
            written.append(data)
        return written

    def _fields(self) -> dict[str, Any]:
        steps = []
        for step, shared in zip(self.steps, _shared_prefixes(self.steps), strict=True):
            steps.append(step._fields() | {name: {"continues": True, "new": new} for name, new in shared.items()})
        return super()._fields() | {"steps": steps}

    @field_validator("steps", mode="before")
    @classmethod
    def _read_steps(cls, steps: Any) -> Any:
        if not isinstance(steps, list | tuple) or not any(isinstance(step, dict) for step in steps):
            return steps
        return _restored_steps(steps)


def _shared_prefixes(steps: Sequence[Step]) -> Iterable[dict[str, Any]]:
    """Yields for each step what its ``prompt_ids`` and ``messages`` add to its predecessor, if they continue it.

    Written and pickled trajectories store these differences, so their size also grows linearly with the turns.
    """
    before: Step | None = None
    for step in steps:
        shared: dict[str, Any] = {}
        if before is not None:
            if step.continues(before):
                shared["prompt_ids"] = step.prompt_ids[len(before.prompt_ids) + len(before.completion_ids) :]
            known = len(before.messages)
            if identical(step.messages[:known], before.messages[:]):
                shared["messages"] = step.messages[known:]
        yield shared
        before = step


def _restored_steps(steps: Sequence[Any]) -> list[Any]:
    """Restores steps written by `Trajectory`: full prompts and conversations that share storage."""
    restored: list[Any] = []
    tokens: TokenLog | None = None
    said: Messages | None = None
    for written in steps:
        step: Any = dict(written) if isinstance(written, dict) else written
        fields = step if isinstance(step, dict) else step.__dict__ if isinstance(step, Step) else {}
        if "prompt_ids" in fields and "completion_ids" in fields:
            if isinstance(fields["prompt_ids"], Mapping):
                tokens = _gone_on(fields["prompt_ids"], tokens)
            else:
                tokens = TokenLog(fields["prompt_ids"])
            cut = len(tokens)
            tokens.extend(fields["completion_ids"])
            if isinstance(step, dict):
                step.update(prompt_ids=tokens.view(0, cut), completion_ids=tokens.view(cut, len(tokens)))
        else:
            tokens = None
        messages = fields.get("messages", ())
        said = _gone_on(messages, said) if isinstance(messages, Mapping) else Messages(messages)
        if isinstance(step, dict):
            step["messages"] = said.view()
        restored.append(step)
    return restored


_Log = TypeVar("_Log", TokenLog, Messages)


def _gone_on(written: Mapping[str, Any], log: _Log | None) -> _Log:
    """Extends ``log`` with the additions of a step."""
    if set(written) != {"continues", "new"} or written["continues"] is not True:
        raise ValueError('a step that continues another must be written as {"continues": true, "new": [...]}')
    if log is None:
        raise ValueError("a step that continues another needs a complete step before it")
    log.extend(written["new"])
    return log


def _readable(error: Any) -> Any:
    return well_formed(error) if isinstance(error, str) else error


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
        if len(self.rollout_ids) != len(self.trajectories):
            raise ValueError(f"{len(self.rollout_ids)} rollout ids for {len(self.trajectories)} trajectories")
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
        for what, array in (("weight versions", self.weight_versions), ("proximal fractions", self.proximal_fractions)):
            if array is not None and len(array) != len(self.turn_spans):
                raise ValueError(f"{len(array)} {what} for {len(self.turn_spans)} turns")
        for what, array in (
            ("log-probabilities", self.logprobs),
            ("proximal log-probabilities", self.proximal_logprobs),
            ("reference log-probabilities", self.reference_logprobs),
            ("advantages", self.advantages),
        ):
            if array is not None and len(array) != self.sampled_tokens:
                raise ValueError(f"{len(array)} {what} for {self.sampled_tokens} sampled tokens")
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

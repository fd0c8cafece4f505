"""The vocabulary: everything that crosses a boundary between the core and a plugin.

Read from small to large:

* a **token id** is an ``int >= 0``; sequences of them are read-only ``int32`` arrays of shape ``(tokens,)``;
* a **message** is a frozen dictionary (``role``, ``content``, ...); `Messages` is a list of them;
* a **step** is one model call: the exact prompt, the exact completion, their log-probabilities (natural log)
  and the weight version that sampled them;
* a **trajectory** is the steps of one role in one rollout, with its reward;
* an **episode** is one rollout of one task: its trajectories and the reason it ended;
* a **trajectory group** is the trajectories of one task and role, compared with each other by the advantage;
* a **training sample** is one unbroken segment of a trajectory, ready for a backend.

Everything is validated when it is built and survives ``to_json`` / ``from_json`` without loss.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NoReturn, Self, overload

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_serializer,
    model_validator,
)

TokenIds = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

# --------------------------------------------------------------------------------------------------------------------
# Arrays


def token_ids(value: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    """A read-only ``int32`` array of shape ``(tokens,)``; shares memory with ``value`` where it can.

    Raises:
        ValueError: If a value is not a whole number between 0 and 2**31 - 1.
    """
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        array = np.empty(0, np.int32)
    elif array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers, got {array.dtype}")
    elif int(array.min()) < 0 or int(array.max()) > 2**31 - 1:
        raise ValueError("token ids must lie between 0 and 2**31 - 1")
    return _read_only(array.astype(np.int32, copy=False))


def _finite_floats(value: Sequence[float] | npt.NDArray[Any], *, what: str) -> Floats:
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {array.shape}")
    if array.size and array.dtype.kind not in "fiu":
        raise ValueError(f"{what} must be numbers, got {array.dtype}")
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise ValueError(f"{what} must be finite")
    return _read_only(array)


def logprobs(value: Sequence[float] | npt.NDArray[Any]) -> Floats:
    """A read-only ``float32`` array of natural-log probabilities, each finite and at most 0 (plus rounding)."""
    array = _finite_floats(value, what="log-probabilities")
    if array.size and float(array.max()) > 1e-3:
        raise ValueError(f"log-probabilities must not be positive, got {float(array.max()):.4g}")
    return array


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _to_list(array: npt.NDArray[Any]) -> list[Any]:
    return array.tolist()  # type: ignore[no-any-return]


TokenIdsField = Annotated[TokenIds, PlainValidator(token_ids), PlainSerializer(_to_list)]
LogprobsField = Annotated[Floats, PlainValidator(logprobs), PlainSerializer(_to_list)]
FloatsField = Annotated[
    Floats, PlainValidator(partial(_finite_floats, what="advantages")), PlainSerializer(_to_list)
]


class TokenLog:
    """A growing token sequence whose prefixes are handed out as views.

    The prompts of a 100-turn conversation are prefixes of one sequence, so all its steps together cost memory linear
    in its length. Growing doubles the buffer; views of an outgrown buffer keep at most as much again alive.
    """

    def __init__(self, tokens: Sequence[int] | TokenIds = ()) -> None:
        self._buffer = np.empty(max(64, len(tokens)), np.int32)
        self._length = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int] | TokenIds) -> None:
        """Append tokens; earlier views stay as they are."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end

    def view(self, start: int, stop: int) -> TokenIds:
        """A read-only view of tokens ``[start, stop)``."""
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"[{start}, {stop}) is outside a sequence of {self._length} tokens")
        return _read_only(self._buffer[start:stop])


def starts_with(tokens: Sequence[int] | TokenIds, prefix: Sequence[int] | TokenIds) -> bool:
    """Whether ``tokens`` begins with ``prefix``, token for token."""
    return len(prefix) <= len(tokens) and bool(np.array_equal(tokens[: len(prefix)], prefix))


# --------------------------------------------------------------------------------------------------------------------
# Messages


def _frozen(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        "a message is frozen once it is in a conversation: replace it (messages[i] = {...}) instead of editing it"
    )


class FrozenDict(dict[str, Any]):
    """A dictionary that can be read, compared and dumped like any other, but not changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _frozen  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (dict(self),))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, _: object) -> dict[str, Any]:
        return {key: thaw(value) for key, value in self.items()}


class FrozenList(list[Any]):
    """A list that can be read, compared and dumped like any other, but not changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = append = extend = insert = pop = remove = clear = sort = reverse = _frozen  # type: ignore[assignment]
    __iadd__ = __imul__ = _frozen  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (list(self),))

    def __deepcopy__(self, _: object) -> list[Any]:
        return [thaw(value) for value in self]


def freeze(value: Any) -> Any:
    """A deep, read-only copy of JSON-like data.

    Raises:
        ValueError: If the data could not be written as JSON without loss.
    """
    if value is None or type(value) in (str, bool, int, FrozenDict, FrozenList):
        return value
    if isinstance(value, float):
        if not np.isfinite(value):
            raise ValueError(f"{value} cannot be written as JSON")
        return float(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be strings")
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList([freeze(item) for item in value])
    if isinstance(value, str | int):  # subclasses: enums, numpy is refused below
        return str(value) if isinstance(value, str) else int(value)
    raise ValueError(f"{type(value).__name__} is not JSON data (allowed: str, int, float, bool, None, dict, list)")


def thaw(value: Any) -> Any:
    """The inverse of `freeze`: plain dictionaries and lists that may be edited."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


def _json_dict(value: Any) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a dictionary, got {type(value).__name__}")
    return freeze(value)  # type: ignore[no-any-return]


JsonDict = Annotated[FrozenDict, PlainValidator(_json_dict), PlainSerializer(dict)]
Message = FrozenDict
MessageLike = Mapping[str, Any]


def message(value: MessageLike) -> Message:
    """Freeze one chat message.

    Raises:
        ValueError: If it has no ``role``, or its content is neither text, a list of parts, nor ``None``.
    """
    if type(value) is FrozenDict and "role" in value:
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"a message is a dictionary with a role, got {type(value).__name__}")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a message needs a role such as 'user', got {role!r}")
    content = value.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise ValueError(f"message content must be text, a list of parts or None, got {type(content).__name__}")
    return freeze(value)  # type: ignore[no-any-return]


class MessageView(Sequence[Message]):
    """A read-only view of the first ``length`` messages of a shared, append-only log."""

    __slots__ = ("_length", "_log")

    def __init__(self, messages: Iterable[MessageLike] = ()) -> None:
        if isinstance(messages, MessageView):
            self._log, self._length = messages._log, messages._length
        else:
            self._log = [message(m) for m in messages]
            self._length = len(self._log)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._log[i] for i in range(*index.indices(self._length))]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"message {index} of {self._length}")
        return self._log[position]

    def __iter__(self) -> Iterator[Message]:
        for position in range(self._length):
            yield self._log[position]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageView) and other._log is self._log and other._length == self._length:
            return True
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    def view(self) -> MessageView:
        """This conversation as it is now, sharing storage: later appends do not show in it."""
        return MessageView(self)

    def extended(self, messages: Iterable[MessageLike]) -> MessageView:
        """This conversation plus ``messages``, sharing storage where nothing else has been appended yet."""
        grown = Messages(self)
        grown.extend(messages)
        return grown.view()


class Messages(MessageView, MutableSequence[Message]):
    """A conversation that is as easy as a list of dictionaries, and cheap to remember.

    ``messages.append({"role": "user", "content": "hi"})`` freezes the dictionary and appends it to a shared log;
    a step holds a view of that log, so what it saw never changes, and n turns cost memory linear in n. Replacing or
    removing an earlier message copies the log first.

        messages = Messages([{"role": "user", "content": "hi"}])
        seen = messages.view()
        messages.append({"role": "assistant", "content": "hello"})
        assert len(seen) == 1
    """

    __slots__ = ()

    def insert(self, index: int, value: MessageLike) -> None:
        """Insert before ``index``; at the end this is an append and copies nothing."""
        if index >= self._length:
            if len(self._log) != self._length:  # somebody else went on from here: branch
                self._log = self._log[: self._length]
            self._log.append(message(value))
        else:
            self._log = self._log[: self._length]
            self._log.insert(index, message(value))
        self._length += 1

    def __setitem__(self, index: Any, value: Any) -> None:
        log = self._log[: self._length]
        log[index] = [message(m) for m in value] if isinstance(index, slice) else message(value)
        self._log, self._length = log, len(log)

    def __delitem__(self, index: int | slice) -> None:
        log = self._log[: self._length]
        del log[index]
        self._log, self._length = log, len(log)


MessageViewField = Annotated[
    MessageView,
    PlainValidator(lambda value: value.view() if isinstance(value, MessageView) else MessageView(value)),
    PlainSerializer(lambda view: [dict(m) for m in view]),
]

# --------------------------------------------------------------------------------------------------------------------
# Records


class Record(BaseModel):
    """Base of the vocabulary: unknown fields are errors, assignments are validated, JSON is lossless."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    def to_json(self) -> str:
        """One line of JSON from which `from_json` builds an equal record."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls.model_validate_json(text)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.model_dump() == other.model_dump()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


Reward = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


def new_id() -> str:
    """A fresh opaque id."""
    return uuid.uuid4().hex


class MediaChunk(Record):
    """A piece of a prompt that is not text: it stands for ``length_tokens`` positions.

    Text-only engines and parsers refuse it at the start, by name (see `text_only`).
    """

    model_config = ConfigDict(frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    kind: Name
    length_tokens: Annotated[int, Field(ge=1)]


TokenInput = Sequence[int | MediaChunk] | TokenIds


def text_only(tokens: TokenInput, provider: str) -> TokenIds:
    """``tokens`` as ids.

    Raises:
        ValueError: If there is media in them; names ``provider``, which cannot take any.
    """
    if not isinstance(tokens, np.ndarray):
        for token in tokens:
            if isinstance(token, MediaChunk):
                raise ValueError(f"{provider} takes text only, but the prompt holds a chunk of kind {token.kind!r}")
    return token_ids(tokens)  # type: ignore[arg-type]


class TerminationReason(StrEnum):
    """Why a rollout ended. A failure is never a reward: its episode carries no trajectory that is trained on."""

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
        """Whether the rollout says nothing about the policy (infrastructure, bugs, cancellation)."""
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
    """Why a completion ended: a stop token was sampled, the token limit was met, or the engine gave up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(Record):
    """How to sample one completion.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it. Log-probabilities are those of the distribution
            after the temperature (of the untempered one when greedy) and *before* ``top_k`` and ``top_p`` cut it.
        top_p: Keep the smallest set of tokens with at least this probability.
        top_k: Keep the k most likely tokens; 0 keeps all.
        max_response_tokens: Upper bound on the completion, stop token included.
        stop_token_ids: Sampling one of these ends the completion; it is part of it.
    """

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_response_tokens: Annotated[int, Field(ge=1)] = 1024
    stop_token_ids: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.temperature, self.top_p, self.top_k, self.max_response_tokens, self.stop_token_ids))


class TokenOutput(Record):
    """What an engine sampled, untouched.

    Attributes:
        token_ids: ``(completion_tokens,)``, the stop token included if one was sampled.
        logprobs: ``(completion_tokens,)``, or None if the engine cannot say. Never padded.
        weight_version: The policy version that sampled it, the oldest if the weights changed on the way.
        newest_weight_version: The newest one, where that differs.
    """

    token_ids: TokenIdsField
    logprobs: LogprobsField | None = None
    finish_reason: FinishReason
    weight_version: Annotated[int, Field(ge=0)]
    newest_weight_version: int | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens")
        return self


class ModelOutput(Record):
    """One answer of the model, as tokens and as a message."""

    message: JsonDict
    prompt_ids: TokenIdsField
    completion_ids: TokenIdsField
    logprobs: LogprobsField | None = None
    finish_reason: FinishReason
    weight_version: Annotated[int, Field(ge=0)]
    newest_weight_version: int | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.completion_ids)} tokens")
        return self


class Task(Record):
    """One problem: an id that is stable between runs, and the row a workflow validated."""

    task_id: Name
    data: JsonDict = Field(default_factory=FrozenDict)


class Step(Record):
    """One model call in a trajectory.

    Attributes:
        messages: What the model was asked, as it was at that moment.
        response: The assistant message parsed from the completion (for people and for the next turn).
        prompt_ids: ``(prompt_tokens,)`` exactly as sent.
        completion_ids: ``(completion_tokens,)`` exactly as sampled.
        logprobs: ``(completion_tokens,)`` natural-log probabilities from the engine, or None if unknown.
        weight_version: Version that sampled the completion; None if it was not sampled by the policy.
        segment: Steps with one number form one unbroken token sequence (see `rllm_core.parser.ParserSession`).
        break_reason: Why this step opened a new segment, on its first step only.
        reward: What the environment gave for this step; None if it gives rewards per trajectory.
    """

    step_id: str = Field(default_factory=new_id)
    messages: MessageViewField = Field(default_factory=MessageView)
    response: JsonDict = Field(default_factory=FrozenDict)
    prompt_ids: TokenIdsField
    completion_ids: TokenIdsField
    logprobs: LogprobsField | None = None
    finish_reason: FinishReason = FinishReason.STOP
    weight_version: Annotated[int, Field(ge=0)] | None = None
    segment: Annotated[int, Field(ge=0)] = 0
    break_reason: str | None = None
    reward: Reward | None = None
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"step {self.step_id}: {len(self.logprobs)} log-probabilities for {len(self.completion_ids)} tokens"
            )
        return self

    @property
    def text(self) -> str:
        """The response's text, for checkers and people; "" if there is none."""
        content = self.response.get("content")
        return content if isinstance(content, str) else ""


class Trajectory(Record):
    """The steps of one role in one rollout.

    Attributes:
        role: Trajectories of one task are compared within a role; a single-agent workflow has one, ``"agent"``.
        reward: Reward of the whole trajectory. None means the sum of its steps' rewards.
        trainable: False for roles that are recorded but not trained.
    """

    role: Name = "agent"
    steps: list[Step] = Field(default_factory=list)
    reward: Reward | None = None
    trainable: bool = True
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @property
    def total_reward(self) -> float:
        """The trajectory's reward, or the sum of its steps' rewards.

        Raises:
            ValueError: If neither was set: a missing reward is not a reward of 0.
        """
        if self.reward is not None:
            return self.reward
        rewards = [step.reward for step in self.steps if step.reward is not None]
        if not rewards:
            raise ValueError(f"trajectory of role {self.role!r} has no reward, neither its own nor any step's")
        return float(sum(rewards))

    @model_serializer(mode="wrap")
    def _share_prefixes(self, handler: Any) -> dict[str, Any]:
        """Write a step that continues its predecessor as the difference, so that files grow linearly too."""
        data: dict[str, Any] = handler(self)
        for position in range(len(self.steps) - 1, 0, -1):
            before, step, written = self.steps[position - 1], self.steps[position], data["steps"][position]
            carried = len(before.prompt_ids) + len(before.completion_ids)
            if starts_with(step.prompt_ids, before.prompt_ids) and starts_with(
                step.prompt_ids[len(before.prompt_ids) :], before.completion_ids
            ):
                written["prompt_ids"] = {"continues": True, "new": _to_list(step.prompt_ids[carried:])}
            shared = len(before.messages)
            if len(step.messages) >= shared and step.messages[:shared] == before.messages[:]:
                written["messages"] = {"continues": True, "new": written["messages"][shared:]}
        return data

    @model_validator(mode="before")
    @classmethod
    def _restore_prefixes(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not any(isinstance(step, dict) for step in data.get("steps") or ()):
            return data
        steps: list[Any] = []
        tokens, prompt_length, conversation = TokenLog(), 0, Messages()
        for written in data["steps"]:
            step = dict(written) if isinstance(written, dict) else dict(written.__dict__)
            prompt, said = step.get("prompt_ids", ()), step.get("messages", ())
            if isinstance(prompt, dict):
                tokens.extend(prompt["new"])
            else:
                tokens = TokenLog(token_ids(prompt))
            prompt_length = len(tokens)
            tokens.extend(token_ids(step.get("completion_ids", ())))
            step["prompt_ids"] = tokens.view(0, prompt_length)
            step["completion_ids"] = tokens.view(prompt_length, len(tokens))
            if isinstance(said, dict):
                conversation.extend(said["new"])
            else:
                conversation = Messages(said)
            step["messages"] = conversation.view()
            steps.append(step)
        return {**data, "steps": steps}


class Episode(Record):
    """One rollout of one task.

    Attributes:
        rollout_id: Opaque and unique in a run; the core fills it in.
        rollout_index: Which of the task's ``rollouts_per_group`` this is.
        is_correct: Whether the task was solved, as its checker says; None if it has no such notion.
        error: Type and message of what went wrong, for failures only.
        metrics: Numbers to average over episodes.
    """

    task_id: Name
    rollout_id: str = ""
    rollout_index: Annotated[int, Field(ge=0)] = 0
    trajectories: list[Trajectory] = Field(default_factory=list)
    termination_reason: TerminationReason = TerminationReason.DONE
    is_correct: bool | None = None
    is_validation: bool = False
    error: str | None = None
    metrics: dict[str, Reward] = Field(default_factory=dict)
    metadata: JsonDict = Field(default_factory=FrozenDict)

    @property
    def weight_version(self) -> int | None:
        """The oldest version among its sampled steps."""
        versions = [s.weight_version for t in self.trajectories for s in t.steps if s.weight_version is not None]
        return min(versions, default=None)


class TrajectoryGroup(Record):
    """Trajectories of one task and role: what an advantage estimator compares with each other.

    Attributes:
        group_id: Position of the group in the run's task stream; unique in a run.
        rollout_ids: ``(trajectories,)`` ids of the rollouts they come from, in the same order.
        weight_version: The oldest version that sampled any of its tokens.
    """

    group_id: Annotated[int, Field(ge=0)]
    task_id: Name
    role: Name = "agent"
    trajectories: list[Trajectory]
    rollout_ids: list[str]
    weight_version: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.rollout_ids) != len(self.trajectories):
            raise ValueError(f"{len(self.rollout_ids)} rollout ids for {len(self.trajectories)} trajectories")
        return self


class TrainingSample(Record):
    """One unbroken segment of a trajectory: tokens, and which of them the policy sampled.

    Only sampled tokens have a log-probability and an advantage, so these arrays are as long as the number of sampled
    tokens; there is nothing to pad.

    Attributes:
        token_ids: ``(tokens,)`` prompt, completions and observations in order.
        turn_spans: ``(turns, 2)`` start and stop of each sampled completion in ``token_ids``.
        logprobs: ``(sampled_tokens,)`` of the rollout policy.
        advantages: ``(sampled_tokens,)``.
        weight_versions: ``(turns,)`` the version that sampled each turn.
    """

    sample_id: str = Field(default_factory=new_id)
    group_id: Annotated[int, Field(ge=0)]
    rollout_id: str
    role: Name = "agent"
    token_ids: TokenIdsField
    turn_spans: tuple[tuple[int, int], ...]
    logprobs: LogprobsField | None
    advantages: FloatsField
    weight_versions: tuple[int, ...]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        end = 0
        for start, stop in self.turn_spans:
            if not end <= start <= stop <= len(self.token_ids):
                raise ValueError(f"turn spans {self.turn_spans} do not fit {len(self.token_ids)} tokens in order")
            end = stop
        if self.turn_spans and self.turn_spans[0][0] == 0:
            raise ValueError("a sample cannot begin with a sampled token: there was no prompt")
        if len(self.weight_versions) != len(self.turn_spans):
            raise ValueError(f"{len(self.weight_versions)} weight versions for {len(self.turn_spans)} turns")
        for what, array in (("log-probabilities", self.logprobs), ("advantages", self.advantages)):
            if array is not None and len(array) != self.sampled_tokens:
                raise ValueError(f"{len(array)} {what} for {self.sampled_tokens} sampled tokens")
        return self

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(stop - start for start, stop in self.turn_spans)

    @property
    def prompt_tokens(self) -> int:
        """Length of the first prompt, which the samples of one group usually share."""
        return self.turn_spans[0][0] if self.turn_spans else len(self.token_ids)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """``(tokens,)`` True exactly on sampled tokens."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, stop in self.turn_spans:
            mask[start:stop] = True
        return mask

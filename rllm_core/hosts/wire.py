"""Messages between a run and its workers, and how they become bytes; docs/worker-protocol.md explains them.

A frame is four bytes with the length, big-endian, and that many bytes of MessagePack: an array of messages. Everything
that is said in one tick of an event loop is one frame. A message is a map with its ``type`` and its fields; a field
with its default may be left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.msgpack import Ext

VERSION = 1
MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")
_BIG_INTEGER = 1  # MessagePack has no integers of more than 64 bits, JSON has


class Message(Struct, tag_field="type", omit_defaults=True):
    """Base class of all messages. Rollouts, conversations and calls are numbered by whoever starts them."""


# --------------------------------------------------------------------------------------------------------------------
# From the run to a worker


class Open(Message, tag="open"):
    """Constructs and opens the workflow. The worker answers with `Opened` or `Broken`.

    Attributes:
        version: Protocol version of the run.
        workflow: Dotted path of the workflow's class, ``package.module:Name`` or ``/folder/file.py:Name``.
        section: The workflow's section of the run file.
        sandbox: Name of the sandbox for model-written code.
        memory_bytes: Maximum memory of the worker, or 0.
        says_settled: Whether the worker sends `Settled`.
        opens: Whether to open the workflow. If False, it only lists tasks.
        says_groups: Whether trajectories come with the names of their advantage groups.
    """

    version: int
    workflow: str
    section: dict[str, Any]
    sandbox: str = "child"
    memory_bytes: int = 0
    says_settled: bool = False
    opens: bool = True
    says_groups: bool = False


class Start(Message, tag="start"):
    """Starts a rollout. The worker ends it with `Ended` or `Failed`.

    Attributes:
        rollout: Number of the rollout, unique in the worker.
        name: Its name, for messages.
        task_id: Id of the task.
        data: Data of the task.
        seed: Seed of its first conversation, for an environment with randomness.
        is_validation: Whether it is for validation.
        sampling: Sampling parameters, for workflows that look at them.
        max_prompt_tokens: Maximum length of a prompt, likewise.
    """

    rollout: int
    name: str
    task_id: str
    data: dict[str, Any]
    seed: int
    is_validation: bool = False
    sampling: dict[str, Any] = {}
    max_prompt_tokens: int | None = None


class SampledStep(Message, tag="step"):
    """A step that the model sampled.

    The run keeps the step; the worker names it by its id. Its tokens are for workflows that look at them.

    Attributes:
        step: Id of the step.
        response: Assistant message.
        kept: How many tokens of this conversation so far the prompt starts with.
        prompt: Ids of the other tokens of the prompt, little-endian ``int32``.
        completion: Ids of the sampled tokens, likewise.
        logprobs: Their log-probabilities, little-endian ``float32``; None if unknown.
        finish_reason: Why sampling stopped.
        weight_version: Version of the weights that sampled it, or None.
        segment: Number of its segment.
        break_reason: Why a new segment starts here, or None.
        control_tokens: How often new text in its prompt spells a control token.
    """

    step: str
    response: dict[str, Any]
    kept: int
    prompt: bytes
    completion: bytes
    logprobs: bytes | None
    finish_reason: str
    weight_version: int | None
    segment: int = 0
    break_reason: str | None = None
    control_tokens: int = 0


class Answer(Message, tag="answer"):
    """Answers a call.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call.
        step: The step.
    """

    rollout: int
    call: int
    step: SampledStep


class CallFailed(Message, tag="call_failed"):
    """Says that a call has no step; the workflow gets an exception.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call.
        kind: ``engine_error``, ``terminated``, ``segment_break``, ``refused_conversation``, ``configuration``,
            ``rollout_ended``, ``value``, ``type`` or ``other``.
        message: What happened.
        reason: Termination reason, if the rollout is over; reason of the break, if a segment cannot be continued.
    """

    rollout: int
    call: int
    kind: str
    message: str
    reason: str = ""


class Cancel(Message, tag="cancel"):
    """Cancels a rollout. The worker answers with `Cancelling`, and still ends the rollout.

    Attributes:
        rollout: Number of the rollout.
    """

    rollout: int


class ListTasks(Message, tag="list_tasks"):
    """Asks for the number of tasks in a split. The worker answers with `Listed` or `Unlisted`.

    Attributes:
        split: ``train`` or ``validation``.
    """

    split: str


class FetchTasks(Message, tag="fetch_tasks"):
    """Asks for tasks of a split. The worker answers with `Fetched` or `Unlisted`.

    Attributes:
        split: ``train`` or ``validation``.
        start: Position of the first task.
        stop: Position after the last one.
    """

    split: str
    start: int
    stop: int


class Close(Message, tag="close"):
    """Closes the workflow. The worker answers with `Closed` and ends."""


# --------------------------------------------------------------------------------------------------------------------
# From a worker to the run


class Ready(Message, tag="ready"):
    """The first message of a worker.

    Attributes:
        version: Protocol version of the worker.
        program: What it runs on, such as ``Python 3.11.7, rllm-core 0.1.0``.
        pid: Its process id.
    """

    version: int
    program: str
    pid: int


class Opened(Message, tag="opened"):
    """The workflow is open."""


class Broken(Message, tag="broken"):
    """The workflow cannot be constructed or opened. The run ends the worker.

    Attributes:
        message: What happened, with file and line.
        traceback: Traceback.
    """

    message: str
    traceback: str = ""


class Call(Message, tag="call"):
    """Asks the model for the next message of a conversation. The run answers with `Answer` or `CallFailed`.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call, unique in the rollout.
        conversation: Path of the conversation: ``[]`` is the first, ``[2]`` its second fork, ``[2, 1]`` the first fork
            of that.
        kept: How many messages of this conversation so far, its last answer included, the messages start with.
        messages: The messages after those. The id of a step stands for its answer.
        tools: Tools on offer, or None; left out if they are those of the last call, and that was answered.
        max_response_tokens: Maximum length of the answer, if it differs from that of the run.
    """

    rollout: int
    call: int
    conversation: list[int]
    kept: int
    messages: list[dict[str, Any] | str]
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    max_response_tokens: int | None = None


class GiveUp(Message, tag="give_up"):
    """The workflow cancelled a call; it expects no answer.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call.
    """

    rollout: int
    call: int


class Listed(Message, tag="listed"):
    """Says how many tasks a split has.

    Attributes:
        total: Number of tasks.
    """

    total: int


class FetchedTask(Message, tag="task"):
    """A task.

    Attributes:
        task_id: Id of the task.
        data: Data of the task.
    """

    task_id: str
    data: dict[str, Any] = {}


class Fetched(Message, tag="fetched"):
    """Tasks of a split.

    Attributes:
        tasks: The tasks, in order.
    """

    tasks: list[FetchedTask]


class Unlisted(Message, tag="unlisted"):
    """Tasks cannot be listed.

    Attributes:
        message: What happened, with file and line.
        is_config: Whether the data or the settings of the user are wrong.
    """

    message: str
    is_config: bool = False


class Cancelling(Message, tag="cancelling"):
    """A rollout is being cancelled.

    Attributes:
        rollout: Number of the rollout.
        waits_at: File, line and function where it waits, or "".
    """

    rollout: int
    waits_at: str = ""


class TimedCall(Message, tag="timed"):
    """Duration of a call to a tool or a reward function.

    Attributes:
        kind: ``tool`` or ``reward``.
        name: Name of the tool or reward function.
        start: Seconds from the start of the rollout.
        seconds: Duration.
    """

    kind: str
    name: str
    start: float
    seconds: float


class ReturnedStep(Message, tag="returned_step"):
    """A step of a trajectory.

    Attributes:
        step: Id of a step that was sampled in this rollout; "" for one that the workflow wrote.
        changes: Fields that the workflow has set, or all of them if it wrote the step.
    """

    step: str = ""
    changes: dict[str, Any] = {}


class ReturnedTrajectory(Message, tag="trajectory"):
    """A trajectory, see `rllm_core.types.Trajectory`.

    Attributes:
        steps: Its steps. A text is the type of an object that is no step.
        fields: Its other fields, as far as they are not the defaults.
        group: Name of its advantage group, if the run asked for it.
    """

    steps: list[ReturnedStep | str]
    fields: dict[str, Any] = {}
    group: str = ""


class Ended(Message, tag="ended"):
    """Ends a rollout whose ``run`` returned.

    Attributes:
        rollout: Number of the rollout.
        returned: Type of what it returned, if that is no episode.
        trajectories: Trajectories of the episode. A text is the type of an object that is no trajectory.
        fields: Other fields of the episode, as far as they are not the defaults.
        timed: Calls to tools and reward functions, in the order in which they ended.
    """

    rollout: int
    returned: str = ""
    trajectories: list[ReturnedTrajectory | str] = []
    fields: dict[str, Any] = {}
    timed: list[TimedCall] = []


class Failed(Message, tag="failed"):
    """Ends a rollout whose ``run`` raised, or was cancelled.

    Attributes:
        rollout: Number of the rollout.
        reason: Termination reason.
        message: Error, with file and line.
        traceback: Traceback.
        is_final: Whether a retry would fail in the same way.
        ends_run: Whether only the user can fix it, so that the next rollout would fail, too.
        call: Number of the call whose failure it raised, or None.
        timed: See `Ended`.
    """

    rollout: int
    reason: str
    message: str
    traceback: str = ""
    is_final: bool = False
    ends_run: bool = False
    call: int | None = None
    timed: list[TimedCall] = []


class Settled(Message, tag="settled"):
    """Every running rollout of the worker waits for the model, or for something outside of the worker.

    Attributes:
        frames: How many frames the worker had read.
        outside: Calls to tools and reward functions that are in progress.
    """

    frames: int
    outside: int = 0


class Fatal(Message, tag="fatal"):
    """The worker cannot go on, such as after its memory was exhausted. The run ends it.

    Attributes:
        message: Why.
    """

    message: str


class Closed(Message, tag="closed"):
    """The workflow is closed. The last message of a worker.

    Attributes:
        message: What failed, or "".
    """

    message: str = ""


FromRun = Open | Start | Answer | CallFailed | Cancel | ListTasks | FetchTasks | Close
OfRollout = Call | GiveUp | Cancelling | Ended | Failed
FromWorker = Ready | Opened | Broken | OfRollout | Listed | Fetched | Unlisted | Settled | Fatal | Closed

_encoder = msgspec.msgpack.Encoder()


def encoded(messages: list[Any]) -> bytes:
    """Returns messages as the content of a frame.

    Raises:
        TypeError: If a field holds anything but JSON data and bytes.
    """
    try:
        return _encoder.encode(messages)
    except OverflowError:
        return _encoder.encode(_without_big_integers(msgspec.to_builtins(messages, builtin_types=(bytes,))))


def _without_big_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_big_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_big_integers(item) for item in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return Ext(_BIG_INTEGER, str(value).encode())
    return value


def _extension(code: int, data: memoryview) -> Any:
    if code != _BIG_INTEGER:
        raise ValueError(f"extension type {code} is unknown")
    return int(bytes(data))


decode_from_run = msgspec.msgpack.Decoder(list[FromRun], ext_hook=_extension).decode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker], ext_hook=_extension).decode


def frame(content: bytes) -> bytes:
    """Returns the content of a frame with its length before it."""
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds bytes, and yields the content of each frame that is complete.

        Raises:
            ValueError: If a frame is larger than `MAX_FRAME_BYTES`.
        """
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a message of {length:,} bytes is larger than {MAX_FRAME_BYTES:,}")
            end = start + _LENGTH.size + length
            if len(received) < end:
                break
            yield bytes(received[start + _LENGTH.size : end])
            start = end
        del received[:start]

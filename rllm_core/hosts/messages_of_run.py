"""Messages from a run to its workers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class Message(Struct, tag_field="type", omit_defaults=True):
    """Base class of all messages. Rollouts, conversations and calls are numbered by whoever starts them."""


class AboutRollout(Message):
    """Base class of messages about a rollout.

    Attributes:
        rollout: Number of the rollout, unique in the worker.
    """

    rollout: int


class AboutCall(AboutRollout):
    """Base class of messages about a call of a rollout.

    Attributes:
        call: Number of the call, unique in the rollout.
    """

    call: int


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


class Start(AboutRollout, tag="start"):
    """Starts a rollout. The worker ends it with `Ended` or `Failed`.

    Attributes:
        name: Name of the rollout, for messages.
        task_id: Id of the task.
        data: Data of the task.
        seed: Seed of the rollout's first conversation, for an environment with randomness.
        is_validation: Whether the rollout is for validation.
        sampling: Sampling parameters, for workflows that look at them.
        max_prompt_tokens: Maximum length of a prompt in tokens, for workflows that look at it.
    """

    name: str
    task_id: str
    data: dict[str, Any]
    seed: int
    is_validation: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None


class SampledStep(Message, tag="step"):
    """A step that the model sampled.

    The run keeps the step; the worker refers to it by its id. The tokens are for workflows that look at them.

    Attributes:
        step: Id of the step.
        response: Assistant message.
        kept: How many tokens of this conversation so far the prompt starts with.
        prompt: Ids of the other prompt tokens, as little-endian ``int32``.
        completion: Ids of the sampled tokens, as little-endian ``int32``.
        logprobs: Log-probabilities of the sampled tokens, as little-endian ``float32``; None if unknown.
        finish_reason: Why sampling stopped.
        weight_version: Version of the weights that sampled it, or None.
        segment: Number of the step's segment.
        break_reason: Why a new segment starts here, or None.
        control_tokens: How often new text in the prompt spells a control token.
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


class CallAnswered(AboutCall, tag="answer"):
    """Answers a call.

    Attributes:
        step: The step.
    """

    step: SampledStep


class Counted(AboutCall, tag="counted"):
    """Answers a call that counts tokens.

    Attributes:
        tokens: Length of the prompt in tokens.
    """

    tokens: int


class Spelled(AboutCall, tag="spelled"):
    """Answers `Spell`.

    Attributes:
        tokens: Bytes of each sampled token.
    """

    tokens: list[bytes]


class CallFailed(AboutCall, tag="call_failed"):
    """Reports that a call has no step; the workflow gets an exception.

    Attributes:
        kind: ``engine_error``, ``terminated``, ``segment_break``, ``refused_conversation``, ``configuration``,
            ``rollout_ended``, ``value``, ``type`` or ``other``.
        message: What happened.
        reason: Termination reason, if the rollout is over; break reason, if a segment cannot be continued.
    """

    kind: str
    message: str
    reason: str = ""


class Cancel(AboutRollout, tag="cancel"):
    """Cancels a rollout. The worker answers with `Cancelling`, and later with `Ended` or `Failed` as usual."""


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


class FetchConversations(Message, tag="fetch_conversations"):
    """Asks for conversations for a model made from scratch. The worker answers with `Conversations` or `Unlisted`.

    Attributes:
        stream: Number of the stream that the conversations belong to; a new number starts a new stream.
        count: How many conversations to send.
        random_state: Random state of a new stream: the 625 numbers of a Mersenne Twister, as in Python's
            ``random.getstate()[1]``. Equal states start equal streams.
    """

    stream: int
    count: int
    random_state: list[int] = field(default_factory=list)


class Close(Message, tag="close"):
    """Closes the workflow. The worker answers with `Closed` and ends."""


Listing = ListTasks | FetchTasks | FetchConversations
FromRun = Open | Start | CallAnswered | Counted | Spelled | CallFailed | Cancel | Listing | Close

"""Messages from a worker to its run."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from rllm_core.hosts.messages_of_run import AboutCall, AboutRollout, Message


class Ready(Message, tag="ready"):
    """The first message of a worker.

    Attributes:
        version: Protocol version of the worker.
        program: Software that the worker runs on, such as ``Python 3.11.7, rllm-core 0.1.0``.
        pid: Process id of the worker.
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


class Fork(Struct, frozen=True, tag="fork", tag_field="type", omit_defaults=True):
    """An element of a path: a fork that has a name, or that starts after a step.

    Attributes:
        name: Name of the fork, or its number among the forks without a name. The fork's seed derives from this.
        after: Id of the step after which the fork starts; "" if it starts empty.
        repeat: How many earlier forks of this conversation have the same name.
    """

    name: int | str
    after: str = ""
    repeat: int = 0


class ModelCall(AboutCall, tag="call"):
    """Asks the model for the next message of a conversation. The run answers with `CallAnswered` or `CallFailed`.

    With ``counts``, it asks for the length of the prompt instead, and the run answers with `Counted` or `CallFailed`.

    Attributes:
        conversation: Path of the conversation: ``[]`` is the first conversation, ``[2]`` its second fork, ``[2, 1]``
            the first fork of that fork. `Fork` represents a fork with a name or a history.
        kept: How many messages of this conversation so far, including its last answer, the messages start with.
        messages: Messages after the kept ones. The id of a step stands for the step's answer.
        tools: Tools on offer, or None; left out if the last call offered the same tools and was answered.
        max_response_tokens: Maximum length of the answer in tokens, if it differs from the run's maximum.
        stop_texts: Texts that end the answer.
        counts: Whether the call only asks for the length of the prompt.
    """

    conversation: list[int | Fork]
    kept: int
    messages: list[dict[str, Any] | str]
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    max_response_tokens: int | None = None
    stop_texts: list[str] = field(default_factory=list)
    counts: bool = False


class Spell(AboutCall, tag="spell"):
    """Asks for the bytes of the sampled tokens of a step. The run answers with `Spelled` or `CallFailed`.

    Attributes:
        step: Id of the step.
    """

    step: str


class GiveUp(AboutCall, tag="give_up"):
    """The workflow cancelled a call; it expects no answer."""


class Listed(Message, tag="listed"):
    """Reports how many tasks a split has.

    Attributes:
        total: Number of tasks; 9223372036854775807 for an endless split.
    """

    total: int


class FetchedTask(Message, tag="task"):
    """A task.

    Attributes:
        task_id: Id of the task.
        data: Data of the task.
    """

    task_id: str
    data: dict[str, Any] = field(default_factory=dict)


class Fetched(Message, tag="fetched"):
    """Tasks of a split.

    Attributes:
        tasks: Tasks in order: at least the first, and fewer than requested if they take long to make.
    """

    tasks: list[FetchedTask]


class Conversations(Message, tag="conversations"):
    """Conversations for a model made from scratch.

    Attributes:
        conversations: Conversations, each a list of messages; fewer than requested only at the end of the stream. nil
            if the workflow has none.
    """

    conversations: list[list[dict[str, Any]]] | None


class Unlisted(Message, tag="unlisted"):
    """Tasks cannot be listed, or conversations cannot be made.

    Attributes:
        message: What happened, with file and line.
        is_config: Whether the user's data or settings are wrong.
    """

    message: str
    is_config: bool = False


class Cancelling(AboutRollout, tag="cancelling"):
    """A rollout is being cancelled.

    Attributes:
        waits_at: File, line and function where the rollout waits, or "".
    """

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
        step: Id of a step that was sampled in this rollout; "" for a step that the workflow wrote.
        changes: Fields that the workflow has set, or all fields if the workflow wrote the step.
    """

    step: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


class ReturnedTrajectory(Message, tag="trajectory"):
    """A trajectory, see `rllm_core.types.Trajectory`.

    Attributes:
        steps: Steps of the trajectory. A text names the type of an object that is not a step.
        fields: Other fields that differ from their defaults.
        group: Name of the trajectory's advantage group, if the run asked for it.
    """

    steps: list[ReturnedStep | str]
    fields: dict[str, Any] = field(default_factory=dict)
    group: str = ""


class Ended(AboutRollout, tag="ended"):
    """Ends a rollout whose ``run`` returned.

    Attributes:
        returned: Type of the returned object, if it is not an episode.
        trajectories: Trajectories of the episode. A text names the type of an object that is not a trajectory.
        fields: Other fields of the episode that differ from their defaults.
        timed: Calls to tools and reward functions, in the order in which they ended.
        costs: Costs of the rollout besides these calls, by kind, see `rllm_core.costs.spend`.
    """

    returned: str = ""
    trajectories: list[ReturnedTrajectory | str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    timed: list[TimedCall] = field(default_factory=list)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)


class Failed(AboutRollout, tag="failed"):
    """Ends a rollout whose ``run`` raised, or was cancelled.

    Attributes:
        reason: Termination reason.
        message: Error, with file and line.
        traceback: Traceback.
        is_final: Whether a retry would fail in the same way.
        ends_run: Whether only the user can fix the problem, so that the next rollout would fail, too.
        call: Number of the call whose failure ``run`` raised, or None.
        timed: See `Ended`.
        costs: See `Ended`.
    """

    reason: str
    message: str
    traceback: str = ""
    is_final: bool = False
    ends_run: bool = False
    call: int | None = None
    timed: list[TimedCall] = field(default_factory=list)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)


class Settled(Message, tag="settled"):
    """Every running rollout of the worker is waiting for the model, or for something outside the worker.

    Attributes:
        frames: How many frames the worker had read.
        outside: Calls to tools and reward functions that are in progress.
    """

    frames: int
    outside: int = 0


class Fatal(Message, tag="fatal"):
    """The worker cannot continue, for example because its memory was exhausted. The run ends it.

    Attributes:
        message: Reason why the worker cannot continue.
    """

    message: str


class Closed(Message, tag="closed"):
    """The workflow is closed. The last message of a worker.

    Attributes:
        message: What failed, or "".
    """

    message: str = ""


OfRollout = ModelCall | Spell | GiveUp | Cancelling | Ended | Failed
OfListing = Listed | Fetched | Conversations | Unlisted
FromWorker = Ready | Opened | Broken | OfRollout | OfListing | Settled | Fatal | Closed

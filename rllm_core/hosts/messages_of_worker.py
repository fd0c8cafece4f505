"""Messages from a worker to its run."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from rllm_core.hosts.messages_of_run import Message


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


class Fork(Struct, frozen=True, tag="fork", tag_field="type", omit_defaults=True):
    """An element of a path: a fork with a name, or one that begins after a step.

    Attributes:
        name: Its name, or its number among the forks without a name. Its seed derives from this.
        after: Id of the step after which it begins; "" if it begins empty.
        repeat: How many earlier forks of this conversation have the same name.
    """

    name: int | str
    after: str = ""
    repeat: int = 0


class Call(Message, tag="call"):
    """Asks the model for the next message of a conversation. The run answers with `Answer` or `CallFailed`.

    With ``counts``, it asks for the length of the prompt instead, and the run answers with `Counted` or `CallFailed`.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call, unique in the rollout.
        conversation: Path of the conversation: ``[]`` is the first, ``[2]`` its second fork, ``[2, 1]`` the first fork
            of that. `Fork` stands for a fork with a name or a history.
        kept: How many messages of this conversation so far, its last answer included, the messages start with.
        messages: The messages after those. The id of a step stands for its answer.
        tools: Tools on offer, or None; left out if they are those of the last call, and that was answered.
        max_response_tokens: Maximum length of the answer, if it differs from that of the run.
        stop_texts: Texts that end the answer.
        counts: Whether it only asks for the length of the prompt.
    """

    rollout: int
    call: int
    conversation: list[int | Fork]
    kept: int
    messages: list[dict[str, Any] | str]
    tools: list[dict[str, Any]] | UnsetType | None = UNSET
    max_response_tokens: int | None = None
    stop_texts: list[str] = field(default_factory=list)
    counts: bool = False


class Spell(Message, tag="spell"):
    """Asks for the bytes of the sampled tokens of a step. The run answers with `Spelled` or `CallFailed`.

    Attributes:
        rollout: Number of the rollout.
        call: Number of the call, unique in the rollout.
        step: Id of the step.
    """

    rollout: int
    call: int
    step: str


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
        total: Number of tasks; 9223372036854775807 if they are endless.
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
        tasks: The tasks, in order: at least the first, and fewer than asked for if they take long to make.
    """

    tasks: list[FetchedTask]


class Conversations(Message, tag="conversations"):
    """Conversations for a model made from scratch.

    Attributes:
        conversations: Each is a list of messages; fewer than asked for only at the end of the stream. nil if the
            workflow has none.
    """

    conversations: list[list[dict[str, Any]]] | None


class Unlisted(Message, tag="unlisted"):
    """Tasks cannot be listed, or conversations cannot be made.

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
    changes: dict[str, Any] = field(default_factory=dict)


class ReturnedTrajectory(Message, tag="trajectory"):
    """A trajectory, see `rllm_core.types.Trajectory`.

    Attributes:
        steps: Its steps. A text is the type of an object that is no step.
        fields: Its other fields, as far as they are not the defaults.
        group: Name of its advantage group, if the run asked for it.
    """

    steps: list[ReturnedStep | str]
    fields: dict[str, Any] = field(default_factory=dict)
    group: str = ""


class Ended(Message, tag="ended"):
    """Ends a rollout whose ``run`` returned.

    Attributes:
        rollout: Number of the rollout.
        returned: Type of what it returned, if that is no episode.
        trajectories: Trajectories of the episode. A text is the type of an object that is no trajectory.
        fields: Other fields of the episode, as far as they are not the defaults.
        timed: Calls to tools and reward functions, in the order in which they ended.
        costs: What the rollout has spent besides these calls, by kind, see `rllm_core.costs.spend`.
    """

    rollout: int
    returned: str = ""
    trajectories: list[ReturnedTrajectory | str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    timed: list[TimedCall] = field(default_factory=list)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)


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
        costs: See `Ended`.
    """

    rollout: int
    reason: str
    message: str
    traceback: str = ""
    is_final: bool = False
    ends_run: bool = False
    call: int | None = None
    timed: list[TimedCall] = field(default_factory=list)
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)


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

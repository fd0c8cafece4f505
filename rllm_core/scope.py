"""Lifetime of a rollout: when its completers stop working, which steps they returned, and how long its calls took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rllm_core.costs import Tally
from rllm_core.messages import well_formed

if TYPE_CHECKING:
    from rllm_core.engine.answers import Answer
    from rllm_core.types import Step


class CallTime(NamedTuple):
    """A call of a rollout to something outside its workflow.

    Attributes:
        kind: ``model``, ``tool`` or ``reward``.
        name: Name of the tool or reward function; empty for the model.
        start: Seconds from the start of the rollout.
        seconds: Duration.
    """

    kind: str
    name: str
    start: float
    seconds: float


@dataclass(slots=True, eq=False)
class CallTimes:
    """Durations of a rollout and of its calls, in the order in which they ended.

    Attributes:
        began: `time.perf_counter` at the start of the rollout.
        seconds: Duration of the rollout; None while it runs.
        in_progress: Calls to tools and reward functions that have not ended.
    """

    began: float = field(default_factory=time.perf_counter)
    seconds: float | None = None
    calls: list[CallTime] = field(default_factory=list)
    in_progress: int = 0

    def end(self) -> None:
        """Ends the rollout."""
        self.seconds = time.perf_counter() - self.began

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of a line of ``group_timings.jsonl``, in whole microseconds."""
        calls = [
            {
                "kind": call.kind,
                **({"name": well_formed(call.name)} if call.name else {}),
                "start": round(call.start, 6),
                "seconds": round(call.seconds, 6),
            }
            for call in self.calls
        ]
        return {"seconds": None if self.seconds is None else round(self.seconds, 6), "calls": calls}


_calls: ContextVar[CallTimes | None] = ContextVar("calls", default=None)


class timing:
    """Lets `timed` add to ``calls`` in this task and in tasks that it starts."""

    __slots__ = ("_calls", "_token")

    def __init__(self, calls: CallTimes) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._token = _calls.set(self._calls)

    def __exit__(self, *_: object) -> None:
        _calls.reset(self._token)
        self._calls.end()


class timed:
    """Measures a call to a tool or a reward function in the current rollout, if there is one; see `CallTime`."""

    __slots__ = ("_calls", "_kind", "_name", "_start")

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name

    def __enter__(self) -> None:
        self._calls = calls = _calls.get()
        if calls is not None:
            calls.in_progress += 1
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        calls = self._calls
        if calls is not None:
            calls.in_progress -= 1
            ended = time.perf_counter()
            calls.calls.append(CallTime(self._kind, self._name, self._start - calls.began, ended - self._start))


def model_called(start: float) -> None:
    """Adds a call to the model that started at ``start`` (`time.perf_counter`) to the current rollout."""
    calls = _calls.get()
    if calls is not None:
        calls.calls.append(CallTime("model", "", start - calls.began, time.perf_counter() - start))


def ended_calls(*calls: CallTime) -> None:
    """Adds calls that were measured elsewhere to the current rollout."""
    current = _calls.get()
    if current is not None:
        current.calls.extend(calls)


SAMPLED = ("prompt_ids", "completion_ids", "logprobs", "weight_version")


def sampled_of(step: Step) -> tuple[Any, ...]:
    """Returns the values of the fields `SAMPLED`, as the step stores them."""
    return _sampled(step.__dict__)


_sampled: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(*SAMPLED)


class RolloutEnded(RuntimeError):
    """A completer was called after its rollout had ended, so the completion would belong to no rollout."""


class RolloutScope:
    """State shared by the completers of one rollout. A completer without a scope gets its own, which stays open.

    Args:
        name: Name of the rollout, for messages.
        loop: Event loop in which its completers may be used, or None for any.
        on_idle: Called when the last running call has ended after `close`.
        tally: Tally of the rollout's costs. Defaults to a new tally of this scope alone.

    Attributes:
        is_open: Whether completers accept calls.
        answers: Records of the steps that the completers returned, by ``step_id``; empty once ``run`` has ended.
        waits_at: Where the rollout waits in another process, if known.
    """

    __slots__ = ("_calls", "_loop", "_on_idle", "_stopped", "answers", "is_open", "name", "tally", "waits_at")

    def __init__(
        self,
        name: str = "this rollout",
        loop: asyncio.AbstractEventLoop | None = None,
        on_idle: Callable[[RolloutScope], None] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.name = name
        self.tally = Tally() if tally is None else tally
        self.is_open = True
        self.waits_at: str | None = None
        self.answers: dict[str, Answer] = {}
        self._calls: list[asyncio.Task[object]] = []  # a set would take several times the memory
        self._stopped: list[asyncio.Task[object]] = []
        self._loop = loop
        self._on_idle = on_idle

    @property
    def is_busy(self) -> bool:
        """Whether a call is running."""
        return bool(self._calls)

    def call(self) -> _CallInScope:
        """Returns a context that surrounds a call of a completer.

        Raises:
            RolloutEnded: If the rollout has ended, or ends during the call.
            RuntimeError: If the caller runs in another event loop, such as a separate one in a thread.
        """
        return _CallInScope(self)

    def close(self, *, but: asyncio.Task[object] | None = None) -> None:
        """Rejects further calls and cancels the running ones, except the call of task ``but``."""
        self.is_open = False
        for task in self._calls:
            if task is not but and not task.done():
                self._stopped.append(task)
                task.cancel()


class _CallInScope:
    """Context of one call; a class, since a generator-based context would take several times as long."""

    __slots__ = ("_scope", "_task")

    def __init__(self, scope: RolloutScope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        scope = self._scope
        if not scope.is_open:
            raise RolloutEnded(
                f"{scope.name} has ended, so its completers can no longer be used; await or cancel every call, fork "
                "and task before run() returns"
            )
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a completer must be awaited in a task")
        if scope._loop is not None and task.get_loop() is not scope._loop:
            raise RuntimeError(
                "a completer belongs to the event loop of its run; from a thread, call "
                "asyncio.run_coroutine_threadsafe(completer.complete(...), loop).result() with "
                "loop = asyncio.get_running_loop() taken in run()"
            )
        scope._calls.append(task)
        self._task: asyncio.Task[object] = task

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        scope, task = self._scope, self._task
        scope._calls.remove(task)
        if not scope.is_open and not scope._calls and scope._on_idle is not None:
            scope._on_idle(scope)
        if task in scope._stopped and isinstance(error, asyncio.CancelledError):  # cancelled by `close`, nothing else
            scope._stopped.remove(task)
            task.uncancel()
            raise RolloutEnded(f"{scope.name} ended while the model was answering") from None

"""A rollout that runs in a worker, as the worker sees it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rllm_core.costs import Tally, collecting
from rllm_core.engine import EngineError, Terminated
from rllm_core.errors import ConfigError, RefusedConversation
from rllm_core.hosts import wire
from rllm_core.hosts.contract import RolloutFailed
from rllm_core.hosts.remote_completer import RemoteCompleter, SampledSteps
from rllm_core.hosts.rollout_failures import awaited, ends_run, failure_of
from rllm_core.limits.timeouts import waiting_at
from rllm_core.parser import BreakReason, SegmentBreak
from rllm_core.scope import CallTimes, RolloutEnded, RolloutScope, timing
from rllm_core.types import Episode, Record, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import Workflow

_SET_BY_RUN = {"trajectories", "rollout_id", "rollout_index", "is_validation"}


class _Session(Protocol):
    """What a rollout needs of `rllm_core.hosts.worker.WorkerSession`."""

    is_limited: bool
    says_groups: bool

    def say(self, message: wire.FromWorker, /) -> None: ...


class RunningRollout:
    """A rollout in a worker."""

    def __init__(self, start: wire.Start, workflow: Workflow, session: _Session) -> None:
        self._start = start
        self._workflow = workflow
        self._session = session
        self._say = session.say
        self.calls = CallTimes()
        self._tally = Tally()
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sampled = SampledSteps()
        self._task: asyncio.Task[object] | None = None

    def cancel(self) -> None:
        """Cancels the rollout."""
        if self._task is not None:
            self._say(wire.Cancelling(self._start.rollout, waiting_at(self._task) or ""))
            self._task.cancel()

    def answered(self, message: wire.CallAnswered | wire.Counted | wire.Spelled | wire.CallFailed) -> None:
        """Hands an answer to the call that waits for it."""
        future = self._waiting.pop(message.call, None)
        if future is None or future.done():
            return
        match message:
            case wire.CallAnswered():
                future.set_result(message.step)
            case wire.Counted() | wire.Spelled():
                future.set_result(message.tokens)
            case _:
                future.set_exception(_error_of(message))

    async def end(self) -> wire.Ended | wire.Failed:
        """Runs the rollout, and returns its last message."""
        scope = RolloutScope(f"rollout {self._start.name}", asyncio.get_running_loop())
        self._task = asyncio.create_task(self._run(scope), name=scope.name)
        ended: wire.Ended | wire.Failed
        try:
            ended = self._ended(await self._task)
        except asyncio.CancelledError:
            cancelled = RolloutFailed(TerminationReason.CANCELLED, "the workflow was cancelled from within")
            ended = self._failed(cancelled)
        except Exception as error:  # third-party code
            if isinstance(error, MemoryError) and self._session.is_limited:
                raise  # the state of the interpreter is unknown
            ended = self._failed(error)
        finally:
            scope.close()
        ended.timed = [
            wire.TimedCall(call.kind, call.name, call.start, call.seconds)
            for call in self.calls.calls
            if call.kind != "model"  # the run measures those
        ]
        ended.costs = self._tally.to_dict()
        return ended

    async def _run(self, scope: RolloutScope) -> object:
        start = self._start
        completer = RemoteCompleter(start, scope, self._ask, self._sampled)
        task = Task(task_id=start.task_id, data=start.data)
        with timing(self.calls), collecting(self._tally):
            return await awaited(self._workflow.run(task, completer))

    async def _ask(self, call: wire.ModelCall | wire.Spell) -> Any:
        self._asked += 1
        call.call = self._asked
        future: asyncio.Future[Any]
        future = self._waiting[call.call] = asyncio.get_running_loop().create_future()
        self._say(call)
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(call.call, None) is not None:
                self._say(wire.GiveUp(call.rollout, call.call))
            raise

    def _ended(self, returned: object) -> wire.Ended:
        number = self._start.rollout
        if not isinstance(returned, Episode):
            return wire.Ended(number, returned=type(returned).__name__)
        trajectories: list[wire.ReturnedTrajectory | str] = [
            self._trajectory(returned, trajectory) if isinstance(trajectory, Trajectory) else type(trajectory).__name__
            for trajectory in returned.trajectories
        ]
        return wire.Ended(number, trajectories=trajectories, fields=_fields(returned, Episode, _SET_BY_RUN))

    def _trajectory(self, episode: Episode, trajectory: Trajectory) -> wire.ReturnedTrajectory:
        steps: list[wire.ReturnedStep | str] = [
            self._sampled.returned(step) if isinstance(step, Step) else type(step).__name__ for step in trajectory.steps
        ]
        says_group = self._session.says_groups and type(self._workflow).group_of is not Workflow.group_of
        group = self._workflow.group_of(episode, trajectory) if says_group else ""
        return wire.ReturnedTrajectory(steps, _fields(trajectory, Trajectory, {"steps"}), group)

    def _failed(self, error: Exception) -> wire.Failed:
        failed, call = failure_of(error), getattr(error, "call_of_rollout", None)
        return wire.Failed(
            self._start.rollout,
            failed.reason.value,
            str(error) if ends_run(error) else str(failed),
            traceback=failed.traceback,
            is_final=failed.is_final,
            ends_run=ends_run(error),
            call=call,
        )


def _fields(record: Record, kind: type[Record], without: set[str]) -> dict[str, Any]:
    """Returns the fields of a record that differ from their defaults, as JSON.

    Raises:
        TypeError: If the record is of the workflow's own subclass, which the run may not have.
    """
    if type(record) is not kind:
        raise TypeError(
            f"a {type(record).__qualname__} cannot leave its worker; return a rllm_core.types.{kind.__name__}, with "
            "what it adds in its metadata"
        )
    return record.model_dump(exclude=without, exclude_defaults=True)


def _error_of(message: wire.CallFailed) -> Exception:
    """Returns the exception to raise in a workflow whose call has no step."""
    error: Exception
    match message.kind:
        case "terminated":
            error = Terminated(TerminationReason(message.reason), message.message)
        case "segment_break":
            error = SegmentBreak(BreakReason(message.reason))
        case kind:
            error = _ERRORS.get(kind, RuntimeError)(message.message)
    error.call_of_rollout = message.call  # type: ignore[attr-defined]
    return error


_ERRORS: dict[str, type[Exception]] = {
    "engine_error": EngineError,
    "refused_conversation": RefusedConversation,
    "configuration": ConfigError,
    "rollout_ended": RolloutEnded,
    "value": ValueError,
    "type": TypeError,
}

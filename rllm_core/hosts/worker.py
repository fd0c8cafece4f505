"""The worker's side: runs rollouts of one workflow for a run that is elsewhere.

`WorkerSession` knows messages only. `main` connects one to standard input and output, as host ``processes`` wants it;
another host may carry the messages in its own way.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import platform
import resource
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rllm_core.engine import EngineError, Terminated
from rllm_core.errors import ConfigError, RefusedConversation, UserError
from rllm_core.hosts import wire
from rllm_core.hosts.completer import RemoteCompleter, SampledSteps
from rllm_core.hosts.contract import RolloutFailed
from rllm_core.hosts.failures import failure_of
from rllm_core.hosts.pacing import Paced
from rllm_core.limits.timeouts import contained, waiting_at
from rllm_core.parser import BreakReason, SegmentBreak
from rllm_core.plugins.blame import blamed
from rllm_core.providers import resolve
from rllm_core.scope import Calls, RolloutEnded, RolloutScope, timing
from rllm_core.services import Services
from rllm_core.types import Episode, Record, Step, Task, TerminationReason, Trajectory
from rllm_core.version import __version__
from rllm_core.workflow import Workflow

# A run asks a worker for its stack before it kills it; the stack goes to standard error.
ASK_FOR_STACK = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 2
MESSAGES_PER_TICK = 16  # rollouts that go on before the worker reads again, such as a cancellation
MAX_SILENCE_SECONDS = 0.002  # the model need not wait while other rollouts of the worker compute
_OF_RUN = {"trajectories", "rollout_id", "rollout_index", "is_validation"}


class WorkerSession:
    """Runs rollouts for one run.

    Args:
        send: Sends the content of a frame.

    Attributes:
        is_limited: Whether the memory of the process has a limit.
        says_groups: See `wire.Open`.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._outgoing: list[wire.FromWorker] = []
        self._rollouts: dict[int, _Rollout] = {}
        self._workflow: Workflow | None = None
        self._says_settled = self.says_groups = False
        self._tasks: dict[str, Sequence[Task]] = {}
        self.is_limited = False
        self._frames_read = 0
        self._was_active = False
        self._incoming: Paced[wire.FromRun] = Paced(self._receive, MESSAGES_PER_TICK)
        self._flushed_at = 0.0
        self._working: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self.say(wire.Ready(wire.VERSION, f"Python {platform.python_version()}, rllm-core {__version__}", os.getpid()))

    async def wait_closed(self) -> None:
        """Waits until the run has closed the session."""
        await self._closed.wait()

    def receive(self, content: bytes) -> None:
        """Handles the content of a frame."""
        self._frames_read += 1
        self._was_active = True
        self._incoming.add(wire.decode_from_run(content))

    def _receive(self, message: wire.FromRun) -> None:
        match message:
            case wire.Answer() | wire.CallFailed():
                if rollout := self._rollouts.get(message.rollout):
                    rollout.answered(message)
            case wire.Start():
                self._work(self._play(message))
            case wire.Cancel():
                if rollout := self._rollouts.get(message.rollout):
                    rollout.cancel()
            case wire.Open():
                self._work(self._open(message))
            case wire.ListTasks() | wire.FetchTasks():
                self.say(self._listed(message))
            case wire.Close():
                self._work(self._close())

    def say(self, message: wire.FromWorker) -> None:
        """Sends a message at the end of this tick; at once if rollouts compute for long in this tick."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)
        if time.monotonic() - self._flushed_at > MAX_SILENCE_SECONDS:
            self._flush()

    def idle(self) -> None:
        """To be called when the event loop has nothing to do."""
        if self._was_active and self._says_settled and self._workflow is not None:
            outside = sum(rollout.calls.in_progress for rollout in self._rollouts.values())
            self._outgoing.append(wire.Settled(self._frames_read, outside))
            self._flush()
        self._was_active = False

    def _flush(self) -> None:
        self._was_active = True
        self._flushed_at = time.monotonic()
        outgoing, self._outgoing = self._outgoing, []
        if outgoing:
            self._send(wire.encoded(outgoing))

    def _work(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _open(self, message: wire.Open) -> None:
        if message.version != wire.VERSION:
            self.say(wire.Broken(f"the worker speaks version {wire.VERSION} of the protocol, not {message.version}"))
            return
        self._says_settled, self.says_groups = message.says_settled, message.says_groups
        self.is_limited = message.memory_bytes > 0
        if self.is_limited:
            resource.setrlimit(resource.RLIMIT_DATA, (message.memory_bytes, message.memory_bytes))
        try:
            workflow_class: type[Workflow] = resolve(message.workflow)
            workflow = workflow_class(workflow_class.config_model.model_validate(message.section))
            workflow.services = Services(sandbox=message.sandbox)
            if message.opens:
                await contained(workflow.open())
        except BaseException as error:  # third-party code
            failed = failure_of(error)
            self.say(wire.Broken(str(error) if isinstance(error, UserError) else str(failed), failed.traceback))
            return
        self._workflow = workflow
        self.say(wire.Opened())

    def _listed(self, message: wire.ListTasks | wire.FetchTasks) -> wire.Listed | wire.Fetched | wire.Unlisted:
        assert self._workflow is not None, "the run opens a worker before it asks for tasks"
        try:
            tasks = self._tasks.get(message.split)
            if tasks is None:
                found: Any = self._workflow.tasks(message.split)  # type: ignore[arg-type]
                tasks = self._tasks[message.split] = found if hasattr(found, "__getitem__") else list(found)
            if isinstance(message, wire.ListTasks):
                return wire.Listed(len(tasks))
            wanted = [tasks[position] for position in range(message.start, message.stop)]
            return wire.Fetched([wire.FetchedTask(task.task_id, dict(task.data)) for task in wanted])
        except Exception as error:  # third-party code
            is_user = isinstance(error, UserError)
            return wire.Unlisted(str(error) if is_user else f"tasks() failed: {blamed(error)}", is_config=is_user)

    async def _close(self) -> None:
        for rollout in self._rollouts.values():
            rollout.cancel()
        wrong = []
        if self._workflow is not None:
            for close in (self._workflow.close, self._workflow.services.close):
                try:
                    await contained(close())
                except Exception as error:  # third-party code
                    wrong.append(blamed(error))
        self.say(wire.Closed("; ".join(wrong)))
        self._flush()
        self._closed.set()

    async def _play(self, start: wire.Start) -> None:
        assert self._workflow is not None, "the run opens a worker before it starts a rollout"
        rollout = self._rollouts[start.rollout] = _Rollout(start, self._workflow, self)
        try:
            self.say(await rollout.end())
        except MemoryError as error:
            self.say(wire.Fatal(f"a rollout needed more than rollout.worker_memory_bytes allows: {blamed(error)}"))
            self._flush()
        finally:
            del self._rollouts[start.rollout]


class _Rollout:
    """A rollout in a worker.

    Attributes:
        calls: Durations of its calls.
    """

    def __init__(self, start: wire.Start, workflow: Workflow, session: WorkerSession) -> None:
        self._start = start
        self._workflow = workflow
        self._session = session
        self._say = session.say
        self.calls = Calls()
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[wire.SampledStep]] = {}
        self._sampled = SampledSteps()
        self._task: asyncio.Task[object] | None = None

    def cancel(self) -> None:
        """Cancels it."""
        if self._task is not None:
            self._say(wire.Cancelling(self._start.rollout, waiting_at(self._task) or ""))
            self._task.cancel()

    def answered(self, message: wire.Answer | wire.CallFailed) -> None:
        """Hands an answer to the call that waits for it."""
        future = self._waiting.pop(message.call, None)
        if future is None or future.done():
            return
        if isinstance(message, wire.Answer):
            future.set_result(message.step)
        else:
            future.set_exception(_error_of(message))

    async def end(self) -> wire.Ended | wire.Failed:
        """Runs it, and returns its last message."""
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
        return ended

    async def _run(self, scope: RolloutScope) -> object:
        start = self._start
        completer = RemoteCompleter(start, scope, self._ask, self._sampled)
        task = Task(task_id=start.task_id, data=start.data)
        with timing(self.calls):
            return await contained(self._workflow.run(task, completer))

    async def _ask(self, call: wire.Call) -> wire.SampledStep:
        self._asked += 1
        call.call = self._asked
        future: asyncio.Future[wire.SampledStep]
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
        return wire.Ended(number, trajectories=trajectories, fields=_fields(returned, Episode, _OF_RUN))

    def _trajectory(self, episode: Episode, trajectory: Trajectory) -> wire.ReturnedTrajectory:
        steps: list[wire.ReturnedStep | str] = [
            self._sampled.returned(step) if isinstance(step, Step) else type(step).__name__ for step in trajectory.steps
        ]
        says_group = self._session.says_groups and type(self._workflow).group_of is not Workflow.group_of
        group = self._workflow.group_of(episode, trajectory) if says_group else ""
        return wire.ReturnedTrajectory(steps, _fields(trajectory, Trajectory, {"steps"}), group)

    def _failed(self, error: Exception) -> wire.Failed:
        failed, call = failure_of(error), getattr(error, "call_of_rollout", None)
        ends_run = isinstance(error, UserError) and not isinstance(error, RefusedConversation)
        return wire.Failed(
            self._start.rollout,
            failed.reason.value,
            str(error) if ends_run else str(failed),
            traceback=failed.traceback,
            is_final=failed.is_final,
            ends_run=ends_run,
            call=call,
        )


def _fields(record: Record, kind: type[Record], without: set[str]) -> dict[str, Any]:
    """Returns the fields of a record that are not the defaults, as JSON.

    Raises:
        TypeError: If the workflow returns a subclass of its own, which the run may not have.
    """
    if type(record) is not kind:
        raise TypeError(
            f"a {type(record).__qualname__} cannot leave its worker; return a rllm_core.types.{kind.__name__}, with "
            "what it adds in its metadata"
        )
    return record.model_dump(exclude=without, exclude_defaults=True)


def _error_of(message: wire.CallFailed) -> Exception:
    """Returns the exception that a workflow gets for a call without a step."""
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


# --------------------------------------------------------------------------------------------------------------------
# A worker of host ``processes``


class _IdleSelector(selectors.DefaultSelector):
    """Selector that says when its event loop has nothing to do."""

    idle: Callable[[], None] = staticmethod(lambda: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits for events, as usual."""
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(timeout)


class _Connection(asyncio.Protocol):
    """Reads frames from the run, and ends the process when the run is gone.

    Args:
        selector: Selector of the event loop.
        writer: Where to write frames. None if the connection that they come from takes them.

    Attributes:
        session: The session; set once connected.
    """

    session: WorkerSession
    writer: asyncio.WriteTransport

    def __init__(self, selector: _IdleSelector, writer: asyncio.WriteTransport | None = None) -> None:
        self._selector = selector
        self._writer = writer
        self._frames = wire.Frames()

    def connection_made(self, transport: Any) -> None:
        self.writer = self._writer or transport
        self.session = WorkerSession(lambda content: self.writer.write(wire.frame(content)))
        self._selector.idle = self.session.idle

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self.session.receive(content)

    def connection_lost(self, error: Exception | None) -> None:
        os._exit(0)


async def _serve(read: int, write: int, selector: _IdleSelector) -> None:
    loop = asyncio.get_running_loop()
    if stat.S_ISSOCK(os.fstat(read).st_mode):  # asyncio cannot write to a socket as if it were a pipe
        both = socket.socket(fileno=read)
        _, connection = await loop.create_connection(lambda: _Connection(selector), sock=both)
    else:
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write, "wb", 0))
        reader = os.fdopen(read, "rb", 0)
        _, connection = await loop.connect_read_pipe(lambda: _Connection(selector, writer), reader)
    await connection.session.wait_closed()
    while connection.writer.get_write_buffer_size():
        await asyncio.sleep(0.001)


def main() -> None:
    """Serves the run that writes frames to standard input and reads them from standard output."""
    read, write = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a workflow prints is kept with its errors
    faulthandler.register(ASK_FOR_STACK, all_threads=False)
    selector = _IdleSelector()
    loop = asyncio.SelectorEventLoop(selector)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(read, write, selector))
    sys.stderr.flush()
    os._exit(0)  # threads of a library must not keep the worker alive


if __name__ == "__main__":
    main()

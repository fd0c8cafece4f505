"""The worker's side: runs rollouts of one workflow for a run that is elsewhere.

`WorkerSession` handles messages only. `main` connects a session to standard input and output, as host ``processes``
requires; another host may transport the messages in its own way.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import platform
import random
import resource
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rllm_core.errors import UserError
from rllm_core.hosts import wire
from rllm_core.hosts.pacing import Paced
from rllm_core.hosts.rollout_failures import coroutine_of, failure_of
from rllm_core.hosts.worker_side_rollout import RunningRollout
from rllm_core.limits.timeouts import contained
from rllm_core.plugins.blame import blamed
from rllm_core.providers import resolve
from rllm_core.services import Services
from rllm_core.types import Task
from rllm_core.version import __version__
from rllm_core.workflow import Conversation, Workflow

# A run asks a worker for its stack before it kills it; the stack goes to standard error.
ASK_FOR_STACK = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 2
MESSAGES_PER_TICK = 16  # then the worker reads again, since a cancellation may have arrived
MAX_FETCH_SECONDS = 0.1  # a task may take a second to make, and the run may need only one
MAX_SILENCE_SECONDS = 0.002  # so that the model need not wait while other rollouts of the worker compute


class WorkerSession:
    """Runs rollouts for one run.

    Args:
        send: Function that sends the content of a frame.

    Attributes:
        is_limited: Whether the memory of the process is limited.
        says_groups: See `wire.Open`.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._outgoing: list[wire.FromWorker] = []
        self._rollouts: dict[int, RunningRollout] = {}
        self._workflow: Workflow | None = None
        self._says_settled = self.says_groups = False
        self._tasks: dict[str, Sequence[Task]] = {}
        self._streams: dict[int, Iterator[Conversation] | None] = {}
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
            case wire.CallAnswered() | wire.Counted() | wire.Spelled() | wire.CallFailed():
                if rollout := self._rollouts.get(message.rollout):
                    rollout.answered(message)
            case wire.Start():
                self._work(self._play(message))
            case wire.Cancel():
                if rollout := self._rollouts.get(message.rollout):
                    rollout.cancel()
            case wire.Open():
                self._work(self._open(message))
            case wire.ListTasks() | wire.FetchTasks() | wire.FetchConversations():
                self.say(self._listed(message))
            case wire.Close():
                self._work(self._close())

    def say(self, message: wire.FromWorker) -> None:
        """Sends a message at the end of this tick, or at once if rollouts have been computing for long in this tick."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)
        if time.monotonic() - self._flushed_at > MAX_SILENCE_SECONDS:
            self._flush()

    def idle(self) -> None:
        """Called when the event loop has nothing to do."""
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
                await contained(coroutine_of(workflow.open))
        except BaseException as error:  # third-party code
            failed = failure_of(error)
            self.say(wire.Broken(str(error) if isinstance(error, UserError) else str(failed), failed.traceback))
            return
        self._workflow = workflow
        gc.collect()
        gc.freeze()  # no collection needs to walk the imported objects while rollouts wait
        self.say(wire.Opened())

    def _listed(self, message: wire.Listing) -> wire.OfListing:
        assert self._workflow is not None, "the run opens a worker before it asks for tasks"
        if isinstance(message, wire.FetchConversations):
            return self._conversations(message, self._workflow)
        try:
            tasks = self._tasks.get(message.split)
            if tasks is None:
                found: Any = self._workflow.tasks(message.split)  # type: ignore[arg-type]
                tasks = self._tasks[message.split] = found if hasattr(found, "__getitem__") else list(found)
            if isinstance(message, wire.ListTasks):
                return wire.Listed(len(tasks))
            fetched, until = [], time.monotonic() + MAX_FETCH_SECONDS
            for position in range(message.start, message.stop):
                task = tasks[position]
                fetched.append(wire.FetchedTask(task.task_id, dict(task.data)))
                if time.monotonic() > until:
                    break
            return wire.Fetched(fetched)
        except Exception as error:  # third-party code
            return _unlisted("tasks", error)

    def _conversations(
        self, message: wire.FetchConversations, workflow: Workflow
    ) -> wire.Conversations | wire.Unlisted:
        try:
            if message.stream not in self._streams:
                rng = random.Random()
                rng.setstate((3, tuple(message.random_state), None))
                self._streams[message.stream] = workflow.warm_start(rng)
            stream = self._streams[message.stream]
            return wire.Conversations(None if stream is None else list(islice(stream, message.count)))
        except Exception as error:  # third-party code
            return _unlisted("warm_start", error)

    async def _close(self) -> None:
        for rollout in self._rollouts.values():
            rollout.cancel()
        wrong = []
        if self._workflow is not None:
            for close in (self._workflow.close, self._workflow.services.close):
                try:
                    await contained(coroutine_of(close))
                except Exception as error:  # third-party code
                    wrong.append(blamed(error))
        self.say(wire.Closed("; ".join(wrong)))
        self._flush()
        self._closed.set()

    async def _play(self, start: wire.Start) -> None:
        assert self._workflow is not None, "the run opens a worker before it starts a rollout"
        rollout = self._rollouts[start.rollout] = RunningRollout(start, self._workflow, self)
        try:
            self.say(await rollout.end())
        except MemoryError as error:
            self.say(wire.Fatal(f"a rollout needed more than rollout.worker_memory_bytes allows: {blamed(error)}"))
            self._flush()
        finally:
            del self._rollouts[start.rollout]


def _unlisted(method: str, error: Exception) -> wire.Unlisted:
    is_user = isinstance(error, UserError)
    return wire.Unlisted(str(error) if is_user else f"{method}() failed: {blamed(error)}", is_config=is_user)


# --------------------------------------------------------------------------------------------------------------------
# A worker of host ``processes``


class _IdleSelector(selectors.DefaultSelector):
    """Selector that reports when its event loop has nothing to do."""

    idle: Callable[[], None] = staticmethod(lambda: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits for events, as usual."""
        if timeout is None or timeout > 0:
            self.idle()
        return super().select(timeout)


class _Connection(asyncio.Protocol):
    """Reads frames from the run, and ends the process when the run is gone.

    Args:
        writer: Transport to write frames to. None to write to the connection that they are read from.
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
    while connection.writer.get_write_buffer_size():  # send everything: `main` then exits without flushing
        await asyncio.sleep(0.001)


def main() -> None:
    """Serves the run that writes frames to standard input and reads them from standard output."""
    read, write = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keep the workflow's output together with its errors, and out of the frames
    faulthandler.register(ASK_FOR_STACK, all_threads=False)
    faulthandler.enable(all_threads=False)  # the stack of a crash in native code
    selector = _IdleSelector()
    loop = asyncio.SelectorEventLoop(selector)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(read, write, selector))
    sys.stderr.flush()
    os._exit(0)  # threads of a library must not keep the worker alive


if __name__ == "__main__":
    main()

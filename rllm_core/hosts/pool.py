"""Workers that run rollouts: which worker gets which rollout, and what happens when one is lost.

`WorkerPool` is the part that all hosts with workers share. A host says how to start a worker, and how bytes reach it.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.config import RolloutConfig
from rllm_core.engine import Completer
from rllm_core.errors import PluginError, RunError, UserError
from rllm_core.hosts import wire
from rllm_core.hosts.contract import HostedWorkflow, HostReport, Place, RolloutHost
from rllm_core.hosts.elsewhere import WorkflowElsewhere
from rllm_core.hosts.pacing import Paced
from rllm_core.hosts.played import PlayedRollout
from rllm_core.limits.timeouts import GRACE_SECONDS
from rllm_core.plugins.blame import place_in
from rllm_core.text import printable
from rllm_core.types import Task

# A cancelled rollout that does not end within this time loses its worker.
CANCEL_SECONDS = GRACE_SECONDS * 0.6
CLOSE_SECONDS = GRACE_SECONDS
LOST_IN_A_ROW = 3  # per worker, before the run ends
MAX_OUTPUT_BYTES = 16 << 20
KEPT_OUTPUT_BYTES = 64 << 10
SHOWN_OUTPUT_LINES = 3
NOTED_LOSSES = 5  # the others are only counted
MESSAGES_PER_TICK = 32  # a call takes the run about 0.2 ms, and a thousand may arrive at once


class Link:
    """A connection to a worker; hosts implement it.

    Args:
        worker: The worker at the other end.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        worker.link = self

    @abstractmethod
    def send(self, content: bytes) -> None:
        """Sends the content of a frame; never blocks."""

    @abstractmethod
    async def kill(self, *, asking: bool) -> None:
        """Ends the worker and all of its processes, and waits for that.

        Args:
            asking: Whether to ask for its stack first, since it does not react.
        """


class Worker:
    """A worker, as the run sees it.

    Args:
        number: Its number in the pool.
        pool: Its pool.

    Attributes:
        link: Connection to it.
        pid: Its process id, once known.
        machine: Machine that it runs on, if that may be another; a host sets it.
        rollouts: Running rollouts by number.
        output: What it printed last.
    """

    link: Link

    def __init__(self, number: int, pool: WorkerPool) -> None:
        self.number = number
        self.pool = pool
        self.pid = 0
        self.machine = ""
        self.rollouts: dict[int, PlayedRollout] = {}
        self.reserved = 0
        self.played = 0
        self.output: deque[bytes] = deque()
        self.is_open = False
        self.is_closing = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.is_settled = False
        self.outside = 0  # calls to tools and reward functions
        self._output_bytes = self._output_since_rollout = 0
        self._outgoing: list[Any] = []
        self._frames_sent = 0
        self._why_lost: str | None = None
        self._is_lost = False

    @property
    def label(self) -> str:
        """Name of the worker, for messages."""
        where = " on ".join(each for each in (f"pid {self.pid}" if self.pid else "", self.machine) if each)
        return f"worker {self.number}" + (f" ({where})" if where else "")

    def send(self, message: Any) -> None:
        """Sends a message at the end of this tick."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)
        self.is_settled = False

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not self._is_lost:
            self._frames_sent += 1
            self.link.send(wire.encoded(outgoing))

    def received(self, content: bytes) -> None:
        """Handles the content of a frame."""
        try:
            messages = wire.decode_from_worker(content)
        except (msgspec.DecodeError, ValueError) as error:
            self.lose(f"it sent a message that is not one of the protocol: {error}")
            return
        self.pool.incoming.add((self, message) for message in messages)

    def receive(self, message: Any) -> None:
        """Handles a message."""
        if isinstance(message, wire.OfRollout):
            rollout = self.rollouts.get(message.rollout)
            if rollout is None:
                return  # it has ended, such as after its timeout
            rollout.receive(message)
            if isinstance(message, wire.Ended | wire.Failed):
                del self.rollouts[message.rollout]
                self._output_since_rollout = 0
                self.pool.rollout_ended()
        elif isinstance(message, wire.Settled):
            self.is_settled = message.frames == self._frames_sent and not self._outgoing
            self.outside = message.outside
            self.pool.maybe_settled()
        elif isinstance(message, wire.Ready):
            self.pid = message.pid
            if message.version != wire.VERSION:
                self.lose(
                    f"{message.program} speaks version {message.version} of the worker protocol, this run version "
                    f"{wire.VERSION}; install the same rllm-core in both environments"
                )
        elif isinstance(message, wire.Opened):
            self.is_open = True
            self.opened.set_result(None)
            self.pool.maybe_settled()
        elif isinstance(message, wire.Broken):
            if not self.opened.done():
                self.opened.set_exception(PluginError(printable(message.message)))
            self.lose(f"its workflow cannot be opened: {printable(message.message)}")
        elif isinstance(message, wire.Fatal):
            self.lose(printable(message.message))
        elif isinstance(message, wire.Closed):
            if message.message:
                self.pool.note(f"close() of the workflow in {self.label} failed: {printable(message.message)}")
            self.closed.set()

    def printed(self, data: bytes) -> None:
        """Keeps the end of what it printed."""
        self.output.append(data)
        self._output_bytes += len(data)
        self._output_since_rollout += len(data)
        while len(self.output) > 1 and self._output_bytes - len(self.output[0]) >= KEPT_OUTPUT_BYTES:
            self._output_bytes -= len(self.output.popleft())
        if self._output_since_rollout > MAX_OUTPUT_BYTES:
            self.lose(f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB between the ends of two rollouts")

    def lose(self, why: str, *, asking: bool = False) -> None:
        """Gives it up: kills it, and ends its rollouts as lost. Only the first reason counts."""
        if self._why_lost is None:
            self._why_lost = why
            self.is_open = False
            self.pool.start_ending(self, asking=asking)

    def gone(self, how: str) -> None:
        """Handles the end of its process, or of its connection."""
        if self.is_closing:
            self.closed.set()
        else:
            self.lose(how)

    async def end(self, *, asking: bool) -> None:
        """Kills it, and ends its rollouts as lost."""
        await self.link.kill(asking=asking)
        self._is_lost = True
        self.closed.set()
        said = self.last_lines()
        why = f"{self.label} was lost: {self._why_lost}" + (f"; its last output: {said}" if said else "")
        if not self.opened.done():
            self.opened.set_exception(PluginError(why))
        self.opened.exception()
        rollouts, self.rollouts = self.rollouts, {}
        for rollout in rollouts.values():
            rollout.lose(why)
        self.pool.worker_ended(self, why, lost=len(rollouts))

    def last_lines(self) -> str:
        """Returns the last lines of its output as one line."""
        lines = [printable(line) for line in self._text().splitlines() if line.strip()]
        return " | ".join(lines[-SHOWN_OUTPUT_LINES:])

    def _text(self) -> str:
        return b"".join(self.output).decode(errors="replace")

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Place]:
        """Holds a place in it."""
        try:
            yield self
        finally:
            self.reserved -= 1
            self.pool.place_free(self)

    async def run(self, task: Task, completer: Completer) -> object:
        """Runs a rollout in it; see `rllm_core.hosts.contract.Place`."""
        self.played += 1
        rollout = PlayedRollout(self.played, task, completer, self.send)
        self.rollouts[rollout.number] = rollout
        if self._is_lost or self._why_lost is not None:
            del self.rollouts[rollout.number]
            rollout.lose(f"{self.label} was lost: {self._why_lost}")
        else:
            rollout.start()
        try:
            return rollout.result(await asyncio.shield(rollout.over))
        except asyncio.CancelledError:
            if not rollout.over.done():
                await self._cancel(rollout, completer)
            raise

    async def _cancel(self, rollout: PlayedRollout, completer: Completer) -> None:
        """Cancels a rollout, and gives up the worker if it does not end."""
        self.send(wire.Cancel(rollout.number))
        await asyncio.wait([rollout.over], timeout=CANCEL_SECONDS)
        if rollout.over.done():
            completer.scope.waits_at = rollout.waits_at
            return
        is_blocked = rollout.waits_at is None
        why = "blocked its worker" if is_blocked else "ignored its cancellation"
        self.lose(f"rollout {rollout.name} {why}", asking=is_blocked)
        await asyncio.wait([rollout.over], timeout=CANCEL_SECONDS)
        place = place_in(self._text()) if is_blocked else None
        where = f"{place.where} in {place.function}()" if place is not None else rollout.waits_at
        completer.scope.waits_at = f"{where or 'an unknown line'}; it {why}, so its worker was killed"


class WorkerPool(RolloutHost):
    """A host with workers.

    Attributes:
        workers: Living workers.
        incoming: Messages that arrived, with their workers.
    """

    def __init__(self, hosted: HostedWorkflow, config: RolloutConfig, section: Any = None) -> None:
        super().__init__(hosted, config, section)
        self.workers: list[Worker] = []
        self.size = config.workers or len(os.sched_getaffinity(0))
        self._started = 0
        self._restarts = 0
        self._lost_rollouts = 0
        self._lost_in_a_row = 0
        self._is_open = False
        self._failure: Exception | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self.incoming: Paced[tuple[Worker, Any]] = Paced(lambda one: one[0].receive(one[1]), MESSAGES_PER_TICK)
        self.note: Callable[[str], None] = lambda line: None
        self._settled: Callable[[], None] = lambda: None

    @abstractmethod
    async def start_worker(self, worker: Worker) -> None:
        """Starts a worker, and makes the `Link` to it.

        Raises:
            UserError: If it cannot be started.
        """

    @property
    def capacity(self) -> int | None:
        """All places of all workers, or None if they are not limited."""
        each = self.config.rollouts_per_worker
        return self.size * each if each else None

    @property
    def is_settled(self) -> bool:
        """Whether no worker computes anything."""
        return all(worker.is_settled for worker in self.workers if worker.rollouts)

    @property
    def outside(self) -> int:
        """Calls to tools and reward functions that are in progress."""
        return sum(worker.outside for worker in self.workers)

    def maybe_settled(self) -> None:
        """Tells the run if no worker computes anything any more."""
        if self.is_settled:
            self._settled()

    def report(self) -> HostReport:
        """Returns the number of workers, and what was lost."""
        where = f"{self.size} {self.what(self.size)}"
        return HostReport(where=where, restarts=self._restarts, lost_rollouts=self._lost_rollouts)

    def what(self, number: int) -> str:
        """What its workers are, for messages."""
        return "workers" if number != 1 else "worker"

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Starts all workers, and waits until the workflow is open in each."""
        self.note, self._settled, self._folder = note, settled, folder
        self._failure = None
        await asyncio.gather(*[self._start() for _ in range(self.size)])
        await asyncio.gather(*[worker.opened for worker in self.workers])
        self._is_open = True

    async def close(self) -> None:
        """Closes the workflow in all workers, and ends them."""
        self._is_open = False
        await asyncio.gather(*[self._close(worker) for worker in list(self.workers)])
        while self._background:
            await asyncio.wait(self._background)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Waits for a free place in an open worker."""
        async with (await self._reserve()).hold() as place:
            yield place

    async def _reserve(self) -> Worker:
        while True:
            if self._failure is not None:
                raise self._failure
            each = self.config.rollouts_per_worker or float("inf")
            free = [worker for worker in self.workers if worker.is_open and worker.reserved < each]
            if free:
                chosen = min(free, key=lambda worker: worker.reserved)
                chosen.reserved += 1
                return chosen
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def place_free(self, worker: Worker) -> None:
        """Replaces a worker that has run enough rollouts, and wakes those that wait for a place."""
        most = self.config.replace_worker_after_rollouts
        if most and worker.played >= most and not worker.reserved and worker.is_open and self._is_open:
            worker.is_open = False
            self.do(self._replace(worker))
        if self._waiting:
            self._wake()

    def rollout_ended(self) -> None:
        """Notes that the workers get something done."""
        self._lost_in_a_row = 0

    async def _start(self) -> Worker:
        self._started += 1
        worker = Worker(self._started, self)
        await self.start_worker(worker)
        self.workers.append(worker)
        hosted = self.hosted
        worker.send(
            wire.Open(
                wire.VERSION,
                hosted.load,
                hosted.section,
                sandbox=hosted.sandbox,
                memory_bytes=self.config.worker_memory_bytes or 0,
                says_settled=True,
                says_groups=isinstance(hosted.workflow, WorkflowElsewhere),
            )
        )
        return worker

    async def _replace(self, worker: Worker) -> None:
        await self._close(worker)
        await self._start_again()

    async def _start_again(self) -> None:
        if not self._is_open:
            return
        try:
            worker = await self._start()
        except UserError as error:
            self._fail(error)
        else:
            await asyncio.wait([worker.opened])
            self._wake()

    async def _close(self, worker: Worker) -> None:
        worker.is_open, worker.is_closing = False, True
        worker.send(wire.Close())
        try:
            await asyncio.wait_for(worker.closed.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self.note(f"the workflow in {worker.label} did not close within {CLOSE_SECONDS:g} s; it was killed")
        if worker in self.workers:
            self.workers.remove(worker)
            await worker.link.kill(asking=False)
            self._keep_output(worker)

    def start_ending(self, worker: Worker, *, asking: bool) -> None:
        """Ends a lost worker in the background."""
        if worker in self.workers:
            self.workers.remove(worker)
        self.do(worker.end(asking=asking))

    def worker_ended(self, worker: Worker, why: str, *, lost: int) -> None:
        """Replaces a lost worker, unless workers are only lost."""
        self._keep_output(worker)
        if not self._is_open:
            return
        self._restarts += 1
        self._lost_rollouts += lost
        self._lost_in_a_row += 1
        self.maybe_settled()
        if self._restarts <= NOTED_LOSSES:
            rollouts = "1 rollout was" if lost == 1 else f"{lost} rollouts were"
            self.note(f"{why}; {rollouts} lost with it and will be repeated")
        if self._lost_in_a_row >= LOST_IN_A_ROW * self.size:
            self._fail(
                RunError(
                    f"{self._lost_in_a_row} workers in a row were lost before a rollout ended in any; the last: {why}"
                )
            )
            return
        self.do(self._start_again())

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._wake()

    def _keep_output(self, worker: Worker) -> None:
        if self._folder is not None and worker.output:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"worker-{worker.number}.log").write_bytes(b"".join(worker.output))

    def do(self, coroutine: Any) -> None:
        """Runs a coroutine in the background until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

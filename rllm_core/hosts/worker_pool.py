"""Assigns rollouts to workers, and replaces workers that are lost.

All hosts with workers share `WorkerPool`. A host defines how to start a worker, and how bytes reach it.
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

from rllm_core.config import RolloutConfig
from rllm_core.errors import RunError, UserError
from rllm_core.hosts import wire
from rllm_core.hosts.contract import HostedWorkflow, HostReport, Place, RolloutHost
from rllm_core.hosts.elsewhere import WorkflowElsewhere
from rllm_core.hosts.pacing import Paced
from rllm_core.hosts.worker_handle import Worker
from rllm_core.limits.timeouts import GRACE_SECONDS

CLOSE_SECONDS = GRACE_SECONDS
LOST_IN_A_ROW = 3  # per worker, before the run ends
NOTED_LOSSES = 5  # the others are only counted
MESSAGES_PER_TICK = 32  # handling a call takes the run about 0.2 ms, and a thousand may arrive at once


class WorkerPool(RolloutHost):
    """A host with workers.

    Attributes:
        workers: Living workers.
        incoming: Messages that have arrived, with their workers.
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
        """Starts the process of a worker, and creates the `Link` to it.

        Raises:
            UserError: If the worker cannot be started.
        """

    @property
    def capacity(self) -> int | None:
        """Total number of slots of all workers, or None if it is not limited."""
        each = self.config.rollouts_per_worker
        return self.size * each if each else None

    @property
    def is_settled(self) -> bool:
        """Whether no worker is computing anything."""
        return all(worker.is_settled for worker in self.workers if worker.rollouts)

    @property
    def outside(self) -> int:
        """Number of calls to tools and reward functions in progress."""
        return sum(worker.outside for worker in self.workers)

    def maybe_settled(self) -> None:
        """Notifies the run if no worker is computing anything any more."""
        if self.is_settled:
            self._settled()

    def report(self) -> HostReport:
        """Returns the number of workers, and of lost workers and rollouts."""
        where = f"{self.size} {self.what(self.size)}"
        return HostReport(where=where, restarts=self._restarts, lost_rollouts=self._lost_rollouts)

    def what(self, number: int) -> str:
        """Describes the pool's workers, for messages."""
        return "workers" if number != 1 else "worker"

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Starts all workers, and waits until the workflow is open in each."""
        self.note, self._settled, self._folder = note, settled, folder
        self._failure = None
        started = await asyncio.gather(*[self._start() for _ in range(self.size)])
        await asyncio.gather(*[worker.opened for worker in started])  # also of those that are lost already
        self._is_open = True

    async def close(self) -> None:
        """Closes the workflow in all workers, and ends them."""
        self._is_open = False
        while self.workers or self._background:  # a worker that is being replaced joins late
            await asyncio.gather(*[self._close(worker) for worker in list(self.workers)])
            if self._background:
                await asyncio.wait(self._background)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Waits for a free slot in an open worker."""
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
        """Replaces a worker that has run enough rollouts, and wakes rollouts that wait for a slot."""
        most = self.config.replace_worker_after_rollouts
        if most and worker.played >= most and not worker.reserved and worker.is_open and self._is_open:
            worker.is_open = False
            self.do(self._replace(worker))
        if self._waiting:
            self._wake()

    def rollout_lost(self) -> None:
        """Counts a rollout whose worker was lost before it started."""
        self._lost_rollouts += 1

    def rollout_ended(self) -> None:
        """Records that the workers are making progress."""
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
        """Replaces a lost worker, unless too many were lost in a row."""
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

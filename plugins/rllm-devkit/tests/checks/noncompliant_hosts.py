"""Rollout hosts that break the contract, each in one way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from rllm_core.builtin.process_host import Processes
from rllm_core.engine import Completer
from rllm_core.hosts.contract import HostReport, Place
from rllm_core.hosts.inline import Inline
from rllm_core.hosts.worker_handle import Worker
from rllm_core.types import Episode, Task


class Changed(Inline):
    """Host whose places do something else than the workflow."""

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        host = self

        class Other:
            async def run(self, task: Task, completer: Completer) -> object:
                return await host.run(task, completer)

        yield Other()

    async def run(self, task: Task, completer: Completer) -> Any:
        return await self.hosted.workflow.run(task, completer)


class NotOpened(Inline):
    async def open(self, **options: Any) -> None:
        pass


class OpenedTwice(Inline):
    async def open(self, **options: Any) -> None:
        await super().open(**options)
        await self.hosted.workflow.open()


class HidesErrors(Inline):
    async def open(self, **options: Any) -> None:
        try:
            await super().open(**options)
        except OSError:
            raise RuntimeError("something went wrong") from None


class Speechless(Inline):
    def report(self) -> HostReport:
        return HostReport(where="")


class WithoutRewards(Changed):
    async def run(self, task: Task, completer: Completer) -> Any:
        episode: Episode = await super().run(task, completer)
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                step.reward = None
        return episode


class OtherForks(Changed):
    async def run(self, task: Task, completer: Completer) -> Any:
        completer.fork()
        return await super().run(task, completer)


class OneError(Changed):
    async def run(self, task: Task, completer: Completer) -> Any:
        try:
            return await super().run(task, completer)
        except Exception:
            raise RuntimeError("the rollout failed") from None


class Shielded(Changed):
    """Does not cancel the rollout."""

    async def run(self, task: Task, completer: Completer) -> Any:
        return await asyncio.shield(super().run(task, completer))


class Stubborn(Changed):
    """Ends a cancelled rollout as if nothing had happened."""

    async def run(self, task: Task, completer: Completer) -> Any:
        try:
            return await super().run(task, completer)
        except asyncio.CancelledError:
            return None


class Leaking(Inline):
    """Keeps the place of a rollout that was cancelled."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free = asyncio.Semaphore(2)

    @property
    def capacity(self) -> int | None:
        return 2

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        await self.free.acquire()
        try:
            yield self.hosted.workflow
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.free.release()
            raise
        else:
            self.free.release()


class Boundless(Inline):
    """Has more places than it says."""

    @property
    def capacity(self) -> int | None:
        return 2


class Forgetful(Leaking):
    """Gives a place to those who have stopped waiting."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held = 0
        self.waiting: list[asyncio.Event] = []

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        if self.held == 2:
            mine = asyncio.Event()
            self.waiting.append(mine)
            await mine.wait()
        else:
            self.held += 1
        yield self.hosted.workflow
        if self.waiting:
            self.waiting.pop(0).set()
        else:
            self.held -= 1


class OneByOne(Changed):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = asyncio.Lock()

    async def run(self, task: Task, completer: Completer) -> Any:
        async with self.lock:
            return await super().run(task, completer)


class Mixing(Changed):
    """Gives a rollout the task of another if many run."""

    running: ClassVar[list[Task]] = []

    async def run(self, task: Task, completer: Completer) -> Any:
        self.running.append(task)
        other = self.running[0] if len(self.running) > 20 else task
        data = {**other.data, "echo": other.data.get("echo")}
        return await super().run(Task(task_id=task.task_id, data=data), completer)


class Hasty(Changed):
    """Says that nothing computes while its rollouts are on their way."""

    async def run(self, task: Task, completer: Completer) -> Any:
        await asyncio.sleep(0.1 + random.Random(task.task_id).random())
        return await super().run(task, completer)


class Boasting(Inline):
    runs_elsewhere = True


class Modest(Processes):
    runs_elsewhere = False


class NotReplaced(Processes):
    async def _start_again(self) -> None:
        pass


class Uncounted(Processes):
    def report(self) -> HostReport:
        return HostReport(where="processes")


class Late(Processes):
    """Says that a lost rollout was late."""

    def start_ending(self, worker: Worker, *, asking: bool) -> None:
        for rollout in worker.rollouts.values():
            if not rollout.over.done():
                rollout.over.set_exception(TimeoutError("late"))
        super().start_ending(worker, asking=asking)


class LeavesTask(Inline):
    async def close(self) -> None:
        await super().close()
        left.append(asyncio.create_task(asyncio.sleep(3600)))


left: list[asyncio.Task[None]] = []


class LeavesChildren(Processes):
    """Kills its workers, and not what they have started."""

    async def start_worker(self, worker: Worker) -> None:
        await super().start_worker(worker)
        link: Any = worker.link

        async def kill_one(*, asking: bool) -> None:
            link._process.kill()
            link._process.wait()
            self.keeper.ended(link._process.pid)
            link._transport.abort()
            link.output.close()

        link.kill = kill_one

"""The rollout host under test, and the rollouts that its checks run in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core.config import RolloutConfig, RunConfig
from rllm_core.engine import Completer, TITOCompleter
from rllm_core.hosts.contract import HostedWorkflow, RolloutHost
from rllm_core.hosts.inline import Inline
from rllm_core.scope import RolloutScope
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, SamplingParams, Task, TokenInput, TokenOutput, thaw
from rllm_core.workflow import Workflow
from rllm_devkit.checks.results import Violation
from rllm_devkit.hosted import Hosted
from rllm_devkit.scripted import ByteParser, ScriptedEngine

MakeHost = Callable[[HostedWorkflow, RolloutConfig], RolloutHost]
CLEANUP_SECONDS = 0.05
BATCH_SECONDS = 0.02


class HostToolParser(ByteParser):
    """Parser that accepts tools."""

    supports_tools = True


class WatchedEngine(ScriptedEngine):
    """Scripted engine that takes a moment to answer, and a moment to release a cancelled request.

    Attributes:
        needed: Number of requests that must arrive before the first is answered.
        asked: Number of requests that were made.
        cancelled: Number of requests that were cancelled.
        batches: Seeds of the requests that were in the engine at the same time.
    """

    def __init__(self, needed: int = 1) -> None:
        super().__init__(HostToolParser())
        self.needed = needed
        self.asked = 0
        self.cancelled = 0
        self.batches: list[list[int]] = []
        self._all_asked = asyncio.Event()
        self._running = 0

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """See `RolloutEngine.get_token_outputs_from_token_input`."""
        if not self._running:
            self.batches.append([])
        self.batches[-1] += seeds
        self._running += 1
        self.asked += len(seeds)
        if self.asked >= self.needed:
            self._all_asked.set()
        try:
            await self._all_asked.wait()
            await asyncio.sleep(BATCH_SECONDS)
        except asyncio.CancelledError:
            self.cancelled += 1
            await asyncio.sleep(CLEANUP_SECONDS)
            raise
        finally:
            self._running -= 1
        return await super().get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=seeds, is_validation=is_validation
        )


@dataclass
class HostProbe:
    """The host under test, and how to run rollouts in it.

    Attributes:
        make: Constructs the host.
        config: Section ``[rollout]`` for the checks.
        folder: Empty folder that the workers can see, too.
        seconds: Timeout for expected events.
        rollout_seconds: Deadline of rollouts that block.
        notes: Lines that the host reported for the user.
    """

    make: MakeHost
    config: RolloutConfig
    folder: Path
    seconds: float
    rollout_seconds: float
    notes: list[str] = field(default_factory=list)

    def host(self, *, workflow: type[Workflow] = Hosted, make: MakeHost | None = None, **rollout: Any) -> RolloutHost:
        """Constructs the host for a workflow, with some keys of ``[rollout]`` changed."""
        hosted = HostedWorkflow(workflow=workflow(), load=f"{workflow.__module__}:{workflow.__qualname__}")
        return (make or self.make)(hosted, self.config.model_copy(update={"max_attempts": 1, **rollout}))

    @asynccontextmanager
    async def opened(self, host: RolloutHost, settled: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Opens a host, and closes it on exit."""
        try:
            await self.soon(host.open(note=self.notes.append, settled=settled, folder=self.folder / "output"), "open()")
            yield
        finally:
            await self.soon(host.close(), "close()")

    async def soon(self, awaitable: Any, what: str) -> Any:
        """Awaits with the timeout for expected events.

        Raises:
            Broken: If the timeout expires.
        """
        task = asyncio.ensure_future(awaitable)
        await asyncio.wait([task], timeout=self.seconds)
        if not task.done():
            task.cancel()
            raise Violation(f"{what} did not end within {self.seconds:g} s")
        return task.result()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition.

        Raises:
            Broken: If the timeout expires.
        """

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        await self.soon(wait(), what)

    async def play(
        self,
        tasks: Sequence[Task],
        host: RolloutHost | None = None,
        *,
        engine: WatchedEngine | None = None,
        lockstep: bool = False,
    ) -> list[Episode]:
        """Opens a host, runs a rollout of every task concurrently, and closes the host."""
        host = host or self.host()
        runner = self.runner(host, engine or WatchedEngine(), lockstep=lockstep)
        async with self.opened(host, runner.merger.settled):
            return await self.rollouts(runner, tasks)

    def runner(self, host: RolloutHost, engine: WatchedEngine, *, lockstep: bool = False) -> RolloutRunner:
        """Returns a runner that runs rollouts in a host, as in a run."""
        config = RunConfig(workflow=host.hosted.workflow.name, rollout=host.config)
        return RolloutRunner(host, engine, config, lockstep=lockstep)

    async def rollouts(self, runner: RolloutRunner, tasks: Sequence[Task]) -> list[Episode]:
        """Runs a rollout of every task concurrently in an open host."""
        running = [runner.run(task, RolloutKey("train", number, 0)) for number, task in enumerate(tasks)]
        played = await self.soon(asyncio.gather(*running), f"{len(tasks)} rollouts")
        await runner.aclose()
        return [rollout.episode for rollout in played]

    async def inline(
        self, tasks: Sequence[Task], *, engine: WatchedEngine | None = None, **options: Any
    ) -> list[Episode]:
        """Runs the same rollouts in this process."""
        return await self.play(tasks, self.host(make=Inline), engine=engine, **options)

    def completer(self, engine: WatchedEngine) -> Completer:
        """Returns a completer for a slot that is used without a runner."""
        return TITOCompleter(engine, scope=RolloutScope("rollout 0-0", asyncio.get_running_loop()))


def comparable(episode: Episode) -> dict[str, Any]:
    """Returns the parts of an episode that do not depend on where it ran: all but ids, places, and core tracebacks.

    For an error, it returns the text after the plugin's name, because processes may know different versions of the
    plugin.
    """
    written: dict[str, Any] = episode.model_dump(mode="json")
    for trajectory in written["trajectories"]:
        for step in trajectory["steps"]:
            del step["step_id"]
    metadata = thaw(written["metadata"])
    for name in ("traceback", "where"):
        metadata.pop(name, None)
    error = written["error"]
    return {**written, "metadata": metadata, "error": error and re.sub(r"^plugin '[^']*'( \([^)]*\))?, ", "", error)}


def difference(mine: Episode, other: Episode) -> str | None:
    """Describes the first difference between two episodes; None if they are equal."""
    left, right = comparable(mine), comparable(other)
    for name in left:
        if left[name] != right[name]:
            return f"{name} is {left[name]!r:.300} where inline has {right[name]!r:.300}"
    return None

"""Host ``ray``: runs rollouts in processes on the nodes of a Ray cluster. Imports Ray only when opened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rllm_core.config import RolloutConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.hosts import wire
from rllm_core.hosts.contract import HostedWorkflow
from rllm_core.hosts.worker import ASK_FOR_STACK
from rllm_core.hosts.worker_handle import Link, Worker
from rllm_core.hosts.worker_pool import WorkerPool
from rllm_core.text import printable
from rllm_ray.cluster import Cluster
from rllm_ray.config import RayConfig

START_SECONDS = 120.0  # for Ray to find room for a worker and start its actor
KILL_SECONDS = 3.0
START_ATTEMPTS = 3


class RayHost(WorkerPool):
    """Runs rollouts in processes on the nodes of a Ray cluster; an actor starts and watches each process."""

    name = "ray"

    def __init__(self, hosted: HostedWorkflow, config: RolloutConfig, section: RayConfig | None = None) -> None:
        super().__init__(hosted, config, section)
        self.settings = section or RayConfig()
        if missing := [name for name in self.settings.environment if name not in os.environ]:
            raise ConfigError(f"ray.environment names {missing[0]}, which is not set here; set it, or remove the name")
        self._cluster = Cluster(self.settings)
        self._actors: Any = None
        self._starting: set[Any] = set()
        self._nodes: set[str] = set()
        self._is_closing = False

    @property
    def capacity(self) -> int | None:
        """Unknown until the cluster is open."""
        is_known = self.config.workers is not None or not self.settings.address
        return super().capacity if is_known else None

    def what(self, number: int) -> str:
        """Describes its workers, for messages."""
        workers = "Ray workers" if number != 1 else "Ray worker"
        return f"{workers} on {len(self._nodes)} nodes" if len(self._nodes) > 1 else workers

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Starts or joins the cluster, and starts all workers in it."""
        settings = self.settings
        await self._cluster.open(self.size * settings.num_cpus)
        if self.config.workers is None and settings.address and settings.num_cpus:
            self.size = max(1, int(await self._cluster.free_cpus() / settings.num_cpus))
        import ray

        from rllm_ray.supervisor import Supervisor

        self._actors = ray.remote(
            num_cpus=settings.num_cpus,
            resources=settings.resources,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
        )(Supervisor)
        await super().open(note=note, settled=settled, folder=folder)

    async def close(self) -> None:
        """Ends all workers, and leaves the cluster."""
        self._is_closing = True
        try:
            if self._starting:
                await asyncio.gather(*[_end(actor) for actor in self._starting])
            await super().close()
        finally:
            await self._cluster.close()

    async def start_worker(self, worker: Worker) -> None:
        """Starts a worker where Ray has room for it."""
        from rllm_ray.supervisor import Spec

        environment = {name: os.environ[name] for name in self.settings.environment}
        spec = msgspec.msgpack.encode(Spec(self.config.python, str(Path.cwd()), environment))
        actor, started = await self._supervised(worker, spec)
        if started.error:
            await _end(actor)
            raise ConfigError(
                f"rollout.python = {self.config.python!r} cannot be started on {started.machine}: {started.error}; set "
                "it to the Python interpreter of an environment that has rllm-core and the workflow on every node"
            )
        worker.machine = started.machine
        self._nodes.add(started.node)
        _RayLink(worker, actor)

    async def _supervised(self, worker: Worker, spec: bytes) -> tuple[Any, Any]:
        """Returns an actor that has started its worker; retries if its node is lost meanwhile."""
        from ray.exceptions import RayError

        from rllm_ray.supervisor import Started

        for attempt in range(1, START_ATTEMPTS + 1):
            actor = self._actors.remote(spec)
            self._starting.add(actor)
            try:
                answer = await self._room(worker, asyncio.wrap_future(actor.start.remote().future()))
                return actor, msgspec.msgpack.decode(answer, type=Started)
            except RayError as error:
                if attempt == START_ATTEMPTS or self._is_closing:
                    reasons = [_reason(error).rstrip("."), self._cluster.token_note]
                    raise RunError(f"Ray cannot start {worker.label}: {'; '.join(filter(None, reasons))}") from error
            except BaseException:
                await _end(actor)
                raise
            finally:
                self._starting.discard(actor)
        raise AssertionError("the last attempt returns or raises")

    async def _room(self, worker: Worker, starting: asyncio.Future[bytes]) -> bytes:
        """Waits until Ray has started an actor; without a deadline if the run can continue with other workers.

        Raises:
            RunError: If Ray cannot start the actor.
        """
        is_said = False
        while not (await asyncio.wait([starting], timeout=START_SECONDS))[0]:
            settings = self.settings
            each = {"CPU": settings.num_cpus, **settings.resources}
            wants = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
            told = f"Ray found no room for {worker.label} within {START_SECONDS:g} s: it wants {wants}"
            if not any(other.is_open for other in self.workers):
                raise RunError(f"{told}; lower rollout.workers or ray.num_cpus, or start Ray on more machines")
            if not is_said:
                self.note(f"{told}; the run continues with {len(self.workers)} of {self.size} workers until it does")
                is_said = True
        return starting.result()


class _RayLink(Link):
    """The connection to a worker, through its actor."""

    def __init__(self, worker: Worker, actor: Any) -> None:
        super().__init__(worker)
        self._actor = actor
        self._send, self._news = actor.send, actor.news
        self._frames = wire.Frames()
        self._sent = 0
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def send(self, content: bytes) -> None:
        self._sent += 1
        self._send.remote(self._sent, wire.frame(content))

    async def _follow(self) -> None:
        """Forwards everything that the worker sends, until it ends. One call is always in flight."""
        from ray.exceptions import RayError

        from rllm_ray.supervisor import News

        worker, decode = self.worker, msgspec.msgpack.Decoder(News).decode
        try:
            while True:
                news = decode(await self._news.remote())
                if news.printed:
                    worker.printed(news.printed)
                for content in self._frames.feed(news.sent):
                    worker.received(content)
                if news.exit_code is not None:
                    worker.gone(_ending(news.exit_code))
                    return
        except RayError as error:
            worker.gone(_reason(error))
        except ValueError as error:
            worker.lose(str(error))

    async def kill(self, *, asking: bool) -> None:
        if not self._following.done():
            self._actor.kill.remote(ASK_FOR_STACK if asking else 0)
            await asyncio.wait([self._following], timeout=KILL_SECONDS)
            self._following.cancel()
        await _end(self._actor)


async def _end(actor: Any) -> None:
    """Ends an actor, and with it the worker that it started."""
    import ray

    await asyncio.to_thread(ray.kill, actor, no_restart=True)


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    how = f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"{how}; the system does that if memory is short" if -exit_code == signal.SIGKILL else how


def _reason(error: Exception) -> str:
    """Returns the reason why an actor was lost, which ends Ray's text."""
    from ray.exceptions import ActorUnavailableError

    if isinstance(error, ActorUnavailableError):
        return "its node, or Ray on it, does not answer any more"
    *_, last = str(error).strip().splitlines() or [""]
    return printable(last.strip()) or type(error).__name__

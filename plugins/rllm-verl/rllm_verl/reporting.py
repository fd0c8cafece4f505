"""verl's vLLM servers, extended to report their tensors through verl's extension point for other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

from rllm_verl import verl_api

WORKER = "rllm_verl.served.ReportingWorker"


class ReportingServer(verl_api.use("vLLMHttpServer")):  # type: ignore[misc]
    """Collects its workers' answers, which verl's own method drops."""

    def _get_worker_extension_cls(self) -> str:
        return WORKER

    async def report(self, names: list[str]) -> dict[str, Any]:
        """Reports the weight version, and the tensors of each worker; see `rllm_verl.served.ReportingWorker`."""
        workers = await self.engine.collective_rpc("report_served", args=(names,))
        return {"version": self.global_steps, "workers": workers}

    async def has_dead_engine(self) -> bool:
        """Returns whether the processes that compute have ended; calls that wait for them would never return."""
        return bool(self.engine.errored)


class ReportingReplica(verl_api.use("vLLMReplica")):  # type: ignore[misc]
    """A server on one or more machines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server_class = ray.remote(ReportingServer)


class ReportingManager(verl_api.use("LLMServerManager")):  # type: ignore[misc]
    """Starts reporting servers, and a router without a process of its own."""

    rollout_replica_class = ReportingReplica

    async def _init_global_load_balancer(self) -> None:
        if self.rollout_config.router_config_path:
            await super()._init_global_load_balancer()  # a router of the user, which may need its own process
        else:
            servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
            self.global_load_balancer = Router(verl_api.use("GlobalRequestLoadBalancer")(servers))


class Router:
    """verl's router in this process, called like the Ray actor that verl's client expects.

    Only this process sends requests. An actor would import verl and vLLM once more, after the servers have started, and
    each request would first ask it.

    Args:
        router: verl's router.
    """

    def __init__(self, router: Any) -> None:
        self._router = router

    def __getattr__(self, name: str) -> SimpleNamespace:
        """Returns a method of the router as a method of an actor."""
        return SimpleNamespace(remote=_answering(getattr(self._router, name)))


def _answering(method: Callable[..., Any]) -> Callable[..., asyncio.Future[Any]]:
    def remote(*arguments: Any, **options: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(method(*arguments, **options))
        return answer

    return remote

"""verl's vLLM servers, extended to report their tensors through verl's extension point for other servers."""

from __future__ import annotations

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


class ReportingReplica(verl_api.use("vLLMReplica")):  # type: ignore[misc]
    """A server on one or more machines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server_class = ray.remote(ReportingServer)


class ReportingManager(verl_api.use("LLMServerManager")):  # type: ignore[misc]
    """Starts reporting servers."""

    rollout_replica_class = ReportingReplica

"""verl's servers: start, weight sync, sleep, and the engines that sample from them."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from omegaconf import DictConfig

from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_verl import verl_api
from rllm_verl.cluster import Cluster
from rllm_verl.engine import VerlEngine


class Servers:
    """The servers of a run, on the trainers' devices or on their own.

    Args:
        cluster: Ray cluster of the run.
        verl: verl's complete configuration.
        trainers: Worker group that sends its weights to the servers.
    """

    def __init__(self, cluster: Cluster, verl: DictConfig, trainers: Any) -> None:
        self._cluster = cluster
        self._verl = verl
        self._trainers = trainers
        self._manager: Any = None
        self._weights: Any = None
        self._are_asleep = False

    async def start(self) -> None:
        """Starts the servers without weights. If they release memory, they sleep until the first weight sync."""
        self._manager = await self._cluster.call("starting the servers", self._start)
        self._cluster.watch_engines({f"the engine of {name}": handle for name, handle in self.handles().items()})
        await self.sleep()

    def _start(self) -> Any:
        is_separated = not self._verl.actor_rollout_ref.hybrid_engine
        group = {} if is_separated else {"worker_group": self._trainers}
        from rllm_verl.reporting import ReportingManager

        manager = ReportingManager.create(config=self._verl, **group)
        engine = verl_api.use("omega_conf_to_dataclass")(self._verl.actor_rollout_ref.rollout.checkpoint_engine)
        replicas = manager.get_replicas()
        self._weights = verl_api.use("CheckpointEngineManager")(engine, self._trainers, replicas)
        for number, replica in enumerate(replicas):
            handles = {f"server {number}": replica._server_handle}
            if is_separated:
                handles |= {f"server {number}, worker {rank}": each for rank, each in enumerate(replica.workers)}
            self._cluster.watch(handles)
        return manager

    def engine(self, parser: BaseParser, max_model_tokens: int) -> VerlEngine:
        """Creates the engine that samples from the servers."""
        is_resuming = self._cluster.config.training.partial_rollout
        client_class = verl_api.use("FullyAsyncLLMServerClient" if is_resuming else "LLMServerClient")
        # A resumed request would repeat the same random numbers.
        return self._engine(
            self._manager.get_client(client_cls=client_class), parser, max_model_tokens, may_seed=not is_resuming
        )

    def engines(self, parser: BaseParser, max_model_tokens: int) -> dict[str, VerlEngine]:
        """Creates one engine per server, by server name."""
        return {
            f"server {number}": self._engine(OneServer(replica._server_handle), parser, max_model_tokens, may_seed=True)
            for number, replica in enumerate(self._manager.get_replicas())
        }

    def handles(self) -> dict[str, Any]:
        """Returns the servers' Ray handles, by server name."""
        return {f"server {number}": each._server_handle for number, each in enumerate(self._manager.get_replicas())}

    def _engine(self, client: Any, parser: BaseParser, max_model_tokens: int, *, may_seed: bool) -> VerlEngine:
        return VerlEngine(
            client,
            parser,
            vocabulary_size=len(parser.tokenizer),
            max_model_tokens=max_model_tokens,
            # On a GPU, seeds cost a kernel launch per row and token, and completions still depend on what else is in
            # the batch. On a CPU, they make completions repeatable.
            sends_seeds=may_seed and self._cluster.settings.device == "cpu",
        )

    async def synchronize(self, version: int, *, deadline_seconds: float) -> None:
        """Sends the trainers' weights to all servers, and wakes sleeping ones.

        Raises:
            RunError: If a worker dies during the sync, or the sync exceeds its deadline.
        """
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._cluster.call(f"weight sync to version {version}", self._weights.update_weights, version)
        except TimeoutError:
            raise RunError(
                f"weight sync to version {version} did not end within {deadline_seconds:g} s (0.95 of "
                "training.sync_timeout_seconds): trainers and servers may be waiting for each other; see Ray's logs "
                f"({self._cluster.log_folder()})"
            ) from None
        self._are_asleep = False

    @property
    def are_asleep(self) -> bool:
        """Whether the servers have released their memory, and so have no weights."""
        return self._are_asleep

    async def sleep(self) -> None:
        """Releases the memory of weights and caches, if configured; the next weight sync wakes the servers."""
        if self._verl.actor_rollout_ref.rollout.free_cache_engine:
            self._are_asleep = True
            await self._cluster.call("putting the servers to sleep", self._weights.sleep_replicas)


class OneServer:
    """Client of a single server, with the interface of verl's ``LLMServerClient``.

    Args:
        server: Ray handle of the server.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Samples one completion."""
        output = await self._server.generate.remote(
            request_id=uuid.uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        version = output.extra_fields.get("global_steps")
        output.extra_fields.update(min_global_steps=version, max_global_steps=version)
        return output


class NoServers:
    """Client of a run whose workflow never samples."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Rejects the request."""
        raise RunError("this run has started no servers, because its workflow samples nothing")


def engine_without_servers(parser: BaseParser, max_model_tokens: int) -> VerlEngine:
    """Creates the engine of a run whose workflow never samples."""
    return VerlEngine(
        NoServers(),
        parser,
        vocabulary_size=len(parser.tokenizer),
        max_model_tokens=max_model_tokens,
        sends_seeds=False,
    )

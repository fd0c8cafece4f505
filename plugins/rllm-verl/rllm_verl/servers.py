"""verl's servers: start, weight sync, and a check that the new weights arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.types import SamplingParams, TrainingSample, token_ids
from rllm_verl import verl_api
from rllm_verl.cluster import Cluster
from rllm_verl.engine import VerlEngine

CANARY = [{"role": "user", "content": "Say something."}]
CANARY_TOKENS = 16


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

    async def start(self) -> None:
        """Starts the servers without weights. If they release memory, they sleep until the first weight sync."""
        self._manager = await self._cluster.call("starting the servers", self._start)
        await self.sleep()

    def _start(self) -> Any:
        is_separated = not self._verl.actor_rollout_ref.hybrid_engine
        group = {} if is_separated else {"worker_group": self._trainers}
        manager = verl_api.use("LLMServerManager").create(config=self._verl, **group)
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
        return VerlEngine(
            self._manager.get_client(client_cls=client_class),
            parser,
            vocabulary_size=len(parser.tokenizer),
            max_model_tokens=max_model_tokens,
            is_resuming=is_resuming,
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

    async def sleep(self) -> None:
        """Releases the memory of weights and caches, if configured; the next weight sync wakes the servers."""
        if self._verl.actor_rollout_ref.rollout.free_cache_engine:
            await self._cluster.call("putting the servers to sleep", self._weights.sleep_replicas)

    async def canary(self, engine: VerlEngine, config: RunConfig, version: int) -> TrainingSample:
        """Samples a few tokens, to compare their log-probabilities with the trainer's.

        Raises:
            RunError: If a server sampled them with another weight version.
        """
        assert engine.parser is not None
        prompt = token_ids(engine.parser.render(CANARY))
        room = engine.max_model_tokens - len(prompt)
        params = SamplingParams(
            temperature=config.rollout.temperature,
            max_response_tokens=max(1, min(CANARY_TOKENS, config.rollout.max_response_tokens, room)),
        )
        output = await engine.get_token_output_from_token_input(prompt, sampling_params=params, seed=version)
        versions = {output.weight_version, output.newest_weight_version or output.weight_version}
        if versions != {version}:
            raise RunError(f"after weight sync to version {version}, a server still uses version {min(versions)}")
        start, stop = len(prompt), len(prompt) + len(output.token_ids)
        return TrainingSample(
            group_id=0,
            rollout_id="canary",
            token_ids=np.concatenate([prompt, output.token_ids]),
            turn_spans=((start, stop),),
            logprobs=output.logprobs,
            advantages=np.zeros(stop - start, np.float32),
            weight_versions=(version,),
        )

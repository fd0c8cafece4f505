"""Backend ``verl``: verl's workers and servers on Ray. Read the training path from top to bottom."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import (
    BackendProtocol,
    Capabilities,
    OptimizerStep,
    Policy,
    PolicyUpdate,
    UpdateResult,
)
from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.memory import MemoryEstimate
from rllm_core.memory.transformer import TransformerShape
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.providers import AdvantageEstimatorProvider
from rllm_core.types import Floats, TrainingSample
from rllm_verl import verl_api
from rllm_verl.batch import OLD_LOGPROBS, Rows, VerlBatch, lay_out
from rllm_verl.checks import check
from rllm_verl.config import VerlConfig
from rllm_verl.lora import COMPARABLE, adapter_of, describe, sync_of
from rllm_verl.losses import VerlLoss
from rllm_verl.memory import estimate, installed_bytes
from rllm_verl.settings import HUB_ID, max_model_tokens, model_description, verl_config, verl_settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rllm_verl.cluster import Cluster
    from rllm_verl.engine import VerlEngine
    from rllm_verl.proofs import Proofs
    from rllm_verl.servers import Servers

logger = logging.getLogger(__name__)

WEIGHTS = "actor"  # folder of verl's checkpoint within ours
ADAPTER = "adapter"  # folder with the adapters in PEFT's format
STATE = "verl.json"


class VerlBackend(BackendProtocol[VerlBatch]):
    """Trains with verl's building blocks, but not with its training loops.

    Passes are only collected: verl's ``update_actor`` does forward, backward and step together. The number of passes
    per step therefore has no effect, and counts cover the whole step.
    """

    name: ClassVar[str] = "verl"

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self.verl: VerlConfig = verl_settings(config)
        self.loss = VerlLoss(config, plugins)
        self.step = 0
        self._cluster: Cluster | None = None
        self._trainers: Any = None
        self._reference: Any = None
        self._initial: str | None = None  # folder with the weights of another run, which this run starts from
        self._servers: Servers | None = None
        self._engine: VerlEngine | None = None
        self._proofs: Proofs | None = None
        self._batches: list[VerlBatch] = []
        self._differences: dict[str, float] = {}  # between trainer and servers, since the last step
        self._version: int | None = None  # live weight version; None after an optimizer step

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """See `BackendProtocol.capabilities`."""
        return Capabilities(
            torch_losses=True,
            aggregations=AGGREGATIONS,
            policies=frozenset({"current", "proximal", "reference"}),
            kl_loss=True,
            entropy_bonus=True,
            colocated=verl_settings(config).placement == "colocated",
            streaming=True,
            deferred_normalisation=True,
            lora=True,
        )

    def validate_config(self) -> list[str]:
        """See `BackendProtocol.validate_config`."""
        verl_api.prepare_ray(is_own=not self.verl.ray_address)
        notes = check(self.config, self.loss)
        _ = self._configuration  # rejects settings that verl does not have
        return notes

    def memory(self, device_bytes: int | None) -> MemoryEstimate | str:
        """See `BackendProtocol.memory`."""
        from omegaconf import OmegaConf

        path = self.config.model.path
        described = model_description(path)
        if self.verl.strategy == "megatron":
            return "memory: verl.strategy = 'megatron' shards differently; there are no formulas for it"
        if not described:
            then = f"; run hf download {path}, then this command again" if HUB_ID.fullmatch(path) else ""
            return f"memory: model.path = {path!r} is not on this machine{then}"
        shape = TransformerShape.of(described)
        if shape is None:
            return f"memory: there are no formulas for models of type {described.get('model_type')!r}"
        if device_bytes is None and self.verl.device == "cuda":
            device_bytes = installed_bytes()
        actor: Any = OmegaConf.to_container(self._configuration.actor_rollout_ref.actor)
        verl = self.verl.model_copy(update={"max_model_tokens": max_model_tokens(self.config)})
        return estimate(self.config, verl, actor, shape, device_bytes, has_servers=self._has_servers)

    @cached_property
    def _configuration(self) -> DictConfig:
        """The run's complete verl configuration."""
        return verl_config(self.config, self.loss)

    async def init_rollout_engine(self, parser: BaseParser) -> VerlEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        verl_api.prepare_ray(is_own=not self.verl.ray_address)
        from rllm_verl.cluster import Cluster
        from rllm_verl.servers import Servers, engine_without_servers

        verl = self._configuration
        self._cluster = cluster = Cluster(self.config, self.verl)
        await cluster.open()
        has_rollout = self._has_servers and self.verl.placement == "colocated"
        role = "actor_rollout" if has_rollout else "actor"
        self._trainers = await cluster.call("starting the trainers", cluster.start_workers, verl, role)
        if self.config.algorithm.kl.coefficient > 0 and self.verl.lora is None:
            await self._frozen()
        longest = max_model_tokens(self.config)
        if not self._has_servers:
            self._engine = engine_without_servers(parser, longest)
            return self._engine
        self._servers = Servers(cluster, verl, self._trainers)
        await self._servers.start()
        self._engine = self._servers.engine(parser, longest)
        self._proofs = self._proofs_of(self._servers, parser, longest)
        return self._engine

    def _proofs_of(self, servers: Servers, parser: BaseParser, max_model_tokens: int) -> Proofs:
        from rllm_verl.canary import Canary
        from rllm_verl.identity import Identity
        from rllm_verl.proofs import Proofs

        compute = partial(self._logprobs, compute=self._trainers.compute_log_prob)
        canary = Canary(servers.engines(parser, max_model_tokens), self.config, compute)
        identity = None
        if self.verl.strategy == COMPARABLE:
            identity = Identity(
                self._allocated(),
                servers.handles(),
                self._trainers,
                adapter=adapter_of(self.verl) if sync_of(self.verl) == "adapter" else None,
                deadline_seconds=self.config.training.sync_timeout_seconds,
            )
        return Proofs(identity, canary, self.verl.sync_check_every, self.verl.sync_numbers_every)

    @cached_property
    def _has_servers(self) -> bool:
        """Whether the run samples: an estimator of target tokens requires a workflow that never samples."""
        provided = self.plugins.select(AdvantageEstimatorProvider, self.config.algorithm.name)
        estimator: type[AdvantageEstimator] = self.plugins.load(provided)
        return not estimator.learns_written

    async def _frozen(self) -> Any:
        """Workers with the run's initial model, on the trainers' devices; started on first use."""
        if self._reference is None:
            cluster, start = self._allocated(), "starting the reference"
            self._reference = await cluster.call(start, cluster.start_workers, self._configuration, "ref")
            if self._initial is not None:
                await cluster.call("loading the reference", self._reference.load_weights, self._initial)
        return self._reference

    # ----------------------------------------------------------------------------------------------------------------
    # One optimizer step

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> VerlBatch:
        """See `BackendProtocol.transform_to_backend_batch`."""
        return VerlBatch(samples)

    async def process_backend_batch(self, batch: VerlBatch) -> None:
        """See `BackendProtocol.process_backend_batch`; only collects the batch until `update_policy`."""
        self._batches.append(batch)

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """See `BackendProtocol.update_policy`."""
        samples = [sample for batch in self._batches for sample in batch.samples]
        self._batches = []
        rows = self._rows(samples)
        if OLD_LOGPROBS not in rows.tensors:
            if self.loss.loss.needs_old_logprobs:
                raise RunError("algorithm.loss needs log-probabilities, but the engine returned none for some samples")
            # verl requires them for every loss, but example conversations were not sampled and have none.
            rows.tensors[OLD_LOGPROBS] = np.zeros(rows.tensors["response_mask"].shape, np.float32)
        algorithm, optimizer = self.config.algorithm, self.config.optimizer
        learning_rate = optimizer.learning_rate_at(step.step, step.total_steps)
        entropy_coefficient = algorithm.entropy_coefficient_at(step.step, step.total_steps)
        data = rows.to_verl(
            {
                "temperature": self.config.rollout.temperature,
                "calculate_entropy": entropy_coefficient > 0,
                "global_batch_size": aggregation_of(self.config).denominator(step) / rows.mini_batches,
                "mini_batch_size": len(rows.tokens) // rows.mini_batches,
                "epochs": 1,
                "seed": self.config.training.seed,
                "dataloader_kwargs": {"shuffle": False},
                "learning_rate": learning_rate,
                "entropy_coefficient": entropy_coefficient,
            }
        )
        found = await self._allocated().call("the optimizer step", self._trainers.update_actor, data)
        reported = verl_api.use("get_non_tensor")(found, "metrics")
        metrics = {"learning_rate": learning_rate} | _numbers(reported) | self._differences
        self._differences = {}
        if not np.isfinite(metrics["grad_norm"]):
            raise RunError(
                f"optimizer step {step.step}: the gradient is not finite; try a lower optimizer.learning_rate"
            )
        self.step, self._version = step.step, None
        return UpdateResult(metrics)

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """See `BackendProtocol.compute_logprobs`.

        The proximal policy is the current weights, because they do not change before the step is taken. With
        ``verl.old_logprob = "last_sync"`` it is the weights of the last weight sync.
        """
        if policy == "reference":
            has_adapters = self.verl.lora is not None  # then the trainers themselves are the reference without them
            compute = (
                self._trainers.compute_initial_log_prob if has_adapters else (await self._frozen()).compute_ref_log_prob
            )
            return await self._logprobs(samples, compute)
        is_old = policy == "proximal" and self._keeps_synced_weights
        compute = self._trainers.compute_synced_log_prob if is_old else self._trainers.compute_log_prob
        found = await self._logprobs(samples, compute)
        self._compare(samples, found)
        return found

    async def _logprobs(self, samples: Sequence[TrainingSample], compute: Any) -> list[Floats]:
        rows = self._rows(samples)
        data = rows.to_verl(
            {
                "temperature": self.config.rollout.temperature,
                "calculate_entropy": False,
                "compute_loss": False,
                "global_token_num": rows.tokens,
            }
        )
        found = await self._allocated().call("computing log-probabilities", compute, data)
        nested = verl_api.use("get_non_tensor")(found, "log_probs")
        return rows.sampled(verl_api.use("no_padding_2_padding")(nested, data))

    def _rows(self, samples: Sequence[TrainingSample]) -> Rows:
        verl = self.verl
        return lay_out(
            samples,
            ranks=verl.data_parallel,
            mini_batches=verl.mini_batches,
            max_tokens=verl.max_tokens_per_device * verl.sequence_parallel,
        )

    def _compare(self, samples: Sequence[TrainingSample], logprobs: Sequence[Floats]) -> None:
        """Records the largest difference between trainer and servers on tokens that the live weights sampled."""
        gaps = []
        for sample, mine in zip(samples, logprobs, strict=True):
            if sample.logprobs is None or self._version is None:
                continue
            position = 0
            for (start, stop), version in zip(sample.turn_spans, sample.weight_versions, strict=True):
                turn = slice(position, position + stop - start)
                if version == self._version:
                    gaps.append(np.abs(mine[turn] - sample.logprobs[turn]))
                position = turn.stop
        if gaps:
            self._differences["rollout_logprob_difference_max"] = float(np.concatenate(gaps).max(initial=0.0))

    # ----------------------------------------------------------------------------------------------------------------
    # Weights

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """See `BackendProtocol.on_policy_updated`; also checks that the servers have the trainer's weights."""
        engine, proofs = self._engine, self._proofs
        assert engine is not None
        if self._servers is not None:
            await self._synchronize(update.version)
        engine.weight_version = self._version = update.version
        if self._keeps_synced_weights:
            await self._allocated().call("keeping the weights", self._trainers.remember_synced_weights)
        if proofs is not None:
            self._differences |= await proofs.check(update.version)

    async def _synchronize(self, version: int) -> None:
        assert self._servers is not None
        deadline_seconds = 0.95 * self.config.training.sync_timeout_seconds
        await self._servers.synchronize(version, deadline_seconds=deadline_seconds)

    @property
    def _keeps_synced_weights(self) -> bool:
        """Whether to keep a copy of the synced weights, because the trainer's weights move on between syncs."""
        return self.verl.old_logprob == "last_sync" and self.config.training.trigger_parameter_sync_step > 1

    async def enter_training(self) -> None:
        """See `BackendProtocol.enter_training`: servers release their memory until the next weight sync."""
        if self._servers is not None:
            await self._servers.sleep()

    async def enter_generation(self) -> None:
        """See `BackendProtocol.enter_generation`; servers without weights receive the live version again.

        A weight sync has already woken the servers, unless the trainer only computed log-probabilities. After an
        optimizer step, the coming sync wakes them.
        """
        if self._servers is not None and self._servers.are_asleep and self._version is not None:
            await self._synchronize(self._version)

    async def save_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.save_checkpoint`.

        These are verl's own files, which torch unpickles. They are loaded only if they match the checksums in the
        manifest of the run folder.
        """
        path = str((directory / WEIGHTS).absolute())
        await self._allocated().call(
            "saving a checkpoint", partial(self._trainers.save_checkpoint, path, global_step=self.step)
        )
        state = {"step": self.step} | self._layout
        if self.verl.lora is not None:
            adapter = str((directory / ADAPTER).absolute())
            await self._allocated().call("saving the adapters", self._trainers.save_adapter, adapter)
        (directory / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    async def load_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.load_checkpoint`."""
        path = self._weights_in(directory)
        await self._allocated().call(
            "loading a checkpoint", partial(self._trainers.load_checkpoint, path, del_local_after_load=False)
        )

    async def load_weights(self, directory: Path) -> None:
        """See `BackendProtocol.load_weights`."""
        self._initial = self._weights_in(directory)
        await self._allocated().call("loading weights", self._trainers.load_weights, self._initial)
        if self._reference is not None:
            await self._allocated().call("loading the reference", self._reference.load_weights, self._initial)

    def _weights_in(self, directory: Path) -> str:
        """Returns the folder of verl's checkpoint within ours.

        Raises:
            RunError: If the checkpoint has other adapters, another strategy or another number of trainers.
        """
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
        here = self._layout
        before, now = (describe(layout.get("adapter")) for layout in (state, here))
        if before != now:
            raise RunError(
                f"the checkpoint in {directory.parent.name} has {before}, and this run trains {now}; set verl.lora "
                "alike, or export the trained model (rllm-core export-model) and start from it"
            )
        if any(state[key] != here[key] for key in ("strategy", "trainers")):
            raise RunError(
                f"the checkpoint in {directory.parent.name} was written with verl.strategy = {state['strategy']!r} on "
                f"{state['trainers']} devices, and verl can read it only with the same; this run has "
                f"{here['strategy']!r} on {here['trainers']}. Export it with rllm-core export-model and start a new "
                "run from that model"
            )
        return str((directory / WEIGHTS).absolute())

    @property
    def _layout(self) -> dict[str, Any]:
        """Describes what a checkpoint must share with the run that loads it."""
        adapter = adapter_of(self.verl)
        layout: dict[str, Any] = {"strategy": self.verl.strategy, "trainers": self.verl.trainers}
        return layout if adapter is None else layout | {"adapter": adapter.to_json()}

    def state_dict(self) -> dict[str, Any]:
        """See `BackendProtocol.state_dict`."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BackendProtocol.load_state_dict`."""
        self.step = int(state["step"])

    async def shutdown(self) -> None:
        """See `BackendProtocol.shutdown`."""
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
        self._cluster = self._trainers = self._reference = self._servers = self._engine = self._proofs = None

    def _allocated(self) -> Cluster:
        if self._cluster is None:
            raise RunError("backend 'verl' has not been initialized")
        return self._cluster


def _numbers(reported: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step under this framework's names; verl's values per mini-batch are averaged."""
    names = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "actor/entropy_loss": "entropy",
        "kl_loss": "kl_reference",
        "actor/pg_clipfrac": "clip_fraction",
        "perf/max_memory_allocated_gb": "trainer_memory_gb",
    }
    return {ours: float(np.mean(reported[theirs])) for theirs, ours in names.items() if theirs in reported}

"""Backend ``tinker``: LoRA through the tinker SDK. Read the training path from top to bottom."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.algorithms.agreement import LogprobDifference
from rllm_core.backend import (
    BackendProtocol,
    Capabilities,
    OptimizerStep,
    Policy,
    PolicyUpdate,
    TokenMeasures,
    UpdateResult,
)
from rllm_core.config import ConfigError, RunConfig
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, TrainingSample
from rllm_tinker import sdk
from rllm_tinker.config import TinkerConfig, api_key
from rllm_tinker.connection import Samplers, ServerSettings
from rllm_tinker.engine import TinkerEngine
from rllm_tinker.losses import LOSSES, ServerLoss
from rllm_tinker.remote import Pass, RemotePolicy, grad_norm

CHECKPOINT = "tinker.json"
NO_CLIPPING = 1e6  # no gradient norm reaches this
COMPARED_TOKENS = 32  # with fewer, the mean difference says little


@dataclass(frozen=True)
class TinkerBatch:
    """One pass in the server's format, with the samples needed to read its response.

    Attributes:
        request: Request to the server.
        samples: Training samples, in the order of the request.
    """

    request: Pass
    samples: Sequence[TrainingSample]


class TinkerBackend(BackendProtocol[TinkerBatch]):
    """Trains LoRA adapters on a server, hosted or self-hosted.

    See `rllm_tinker.losses` for the losses, and `rllm_tinker.remote` for recovery from a lost server.
    """

    name: ClassVar[str] = "tinker"

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self.tinker: TinkerConfig = _settings(config)
        self._policy: RemotePolicy | None = None
        self._engine: TinkerEngine | None = None
        self._batches: list[TinkerBatch] = []
        self._states: list[str] = []  # server paths of checkpoints, oldest first
        self._step = 0
        self._recoveries = 0
        self._version: int | None = None  # live weight version; None after an optimizer step

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """See `BackendProtocol.capabilities`."""
        service, aggregation = _settings(config).scale(), config.algorithm.aggregation
        return Capabilities(
            losses=LOSSES,
            aggregations=AGGREGATIONS,
            policies=frozenset({"current", "proximal", "reference"}),
            lora=True,
            full=False,
            deferred_normalisation=service == "skyrl" and aggregation != "token_mean",
        )

    def validate_config(self) -> list[str]:
        """See `BackendProtocol.validate_config`."""
        if importlib.util.find_spec("tinker") is None:
            raise ConfigError("backend 'tinker' needs the tinker SDK: pip install rllm-tinker")
        self.tinker.check()
        ServerLoss.of(self.config, self.tinker.scale())
        if not self.config.model.path:
            raise ConfigError(
                "model.path is not set: set it to a Hugging Face model ID or a model folder, to read the tokenizer "
                "from; it is also the model's name on the server, unless tinker.base_model is set"
            )
        needed = self.tinker.future_timeout_seconds + self.tinker.reconnect_timeout_seconds
        limit = self.config.training.sync_timeout_seconds
        if needed >= limit:
            raise ConfigError(
                f"training.sync_timeout_seconds = {limit:g} must be more than tinker.future_timeout_seconds + "
                f"tinker.reconnect_timeout_seconds = {needed:g}, because a weight sync may have to wait that long for "
                "a lost server"
            )
        if self.config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature = {self.config.rollout.temperature} must be 1: Tinker servers train the "
                "distribution at temperature 1, so another value would sample from a different policy than the one "
                "trained"
            )
        clipping = self.config.optimizer.max_grad_norm
        if self.tinker.scale() == "skyrl" and clipping < NO_CLIPPING:
            raise ConfigError(
                f"optimizer.max_grad_norm = {clipping:g} cannot be honored: tinker.service = 'skyrl' does not clip "
                f"gradients; set it to {NO_CLIPPING:g}, which disables clipping"
            )
        server = server_of(self.config)
        return [
            f"{server.label}: whether it responds, accepts the key, and has model {server.base_model!r}",
            "weight syncs: whether the server samples with the weights that it trained; its interface cannot "
            "read them, so every step compares log-probabilities (tinker.sync_tolerance)",
        ]

    async def init_rollout_engine(self, parser: BaseParser) -> TinkerEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        self._policy = RemotePolicy(server_of(self.config))
        await self._policy.open()
        self._engine = TinkerEngine(
            self._policy,
            parser,
            vocabulary_size=len(parser.tokenizer),
            request_timeout_seconds=self.config.rollout.request_timeout_seconds,
        )
        return self._engine

    # ----------------------------------------------------------------------------------------------------------------
    # One optimizer step

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> TinkerBatch:
        """See `BackendProtocol.transform_to_backend_batch`; position ``p`` predicts token ``p + 1``."""
        loss = ServerLoss.of(self.config, self.tinker.scale())
        data = []
        for sample, factor in zip(samples, loss.factors(samples), strict=True):
            data.append(_datum(sample, loss.inputs(sample, factor)))
        has_signal = any(sample.advantages.any() for sample in samples)
        return TinkerBatch(Pass(data, loss.server_name, loss.settings, has_signal), samples)

    async def process_backend_batch(self, batch: TinkerBatch) -> None:
        """See `BackendProtocol.process_backend_batch`; sends the pass without waiting for the response."""
        await self._allocated().forward_backward(batch.request)
        self._batches.append(batch)

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """See `BackendProtocol.update_policy`."""
        optimizer, batches = self.config.optimizer, self._batches
        learning_rate = optimizer.learning_rate_at(step.step, step.total_steps)
        clipping = {} if optimizer.max_grad_norm >= NO_CLIPPING else {"grad_clip_norm": optimizer.max_grad_norm}
        adam = sdk.adam(
            learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            **clipping,
        )
        outputs, reported = await self._allocated().optimizer_step(adam)
        self._batches = []
        samples = [sample for batch in batches for sample in batch.samples]
        logprobs = [_sampled_logprobs(sample, output) for sample, output in zip(samples, outputs, strict=True)]
        metrics = self._metrics(step, samples, logprobs)
        metrics["learning_rate"] = learning_rate
        recoveries = self._allocated().recoveries
        metrics["recoveries"], self._recoveries = float(recoveries - self._recoveries), recoveries
        norm = grad_norm(reported)
        if norm is not None:
            metrics["grad_norm"] = norm
        self._step, self._version = step.step, None
        tokens = {
            sample.sample_id: TokenMeasures(logprobs=known) for sample, known in zip(samples, logprobs, strict=True)
        }
        return UpdateResult(metrics, tokens)

    def _metrics(
        self, step: OptimizerStep, samples: Sequence[TrainingSample], logprobs: Sequence[Floats]
    ) -> dict[str, float]:
        loss = ServerLoss.of(self.config, self.tinker.scale())
        total = 0.0
        fresh: list[Floats] = []
        stale: list[Floats] = []
        for sample, current in zip(samples, logprobs, strict=True):
            if not len(current):
                continue
            weight = loss.aggregation.token_weight(len(current)) / loss.aggregation.denominator(step)
            total += weight * float(loss.token_losses(sample, current).sum(dtype=np.float64))
            if sample.logprobs is None:
                continue
            gaps, position = np.abs(current - sample.logprobs), 0
            for (start, stop), version in zip(sample.turn_spans, sample.weight_versions, strict=True):
                turn = gaps[position : position + stop - start]
                (fresh if version == self._version else stale).append(turn)
                position += stop - start
        metrics = {"loss": total}
        for name, arrays in (("rollout_logprob_difference", fresh), ("stale_logprob_difference", stale)):
            if arrays:
                differences = np.concatenate(arrays)
                metrics[f"{name}_mean"] = float(differences.mean())
                if arrays is fresh:
                    metrics[f"{name}_max"] = float(differences.max())
                    self._check_sync(LogprobDifference.of(differences))
        return metrics

    def _check_sync(self, difference: LogprobDifference) -> None:
        """Checks that tokens of the live weight version were sampled with the weights that were trained.

        Raises:
            RunError: If the log-probabilities differ by more than the tolerance.
        """
        tolerance = self.tinker.sync_tolerance
        if difference.tokens >= COMPARED_TOKENS and not difference.typical <= tolerance:  # also NaN
            raise RunError(
                f"weight version {self._version}: the server's sampler and trainer disagree on the log-probabilities "
                f"of {difference.tokens} tokens by {difference.typical:.3g} on average without the largest eighth "
                f"(max {difference.largest:.3g}), but tinker.sync_tolerance = {tolerance:g}: the sampler does not have "
                "the trained weights, or computes with too little precision"
            )

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """See `BackendProtocol.compute_logprobs`.

        The proximal policy is the current one, because weights change only in `update_policy`. The reference is the
        model that the run starts from: the base model, possibly with the adapters of another run.
        """
        data = [_datum(sample, {"weights": np.ones(sample.sampled_tokens, np.float32)}) for sample in samples]
        outputs = await self._allocated().forward(data, reference=policy == "reference")
        return [_sampled_logprobs(sample, output) for sample, output in zip(samples, outputs, strict=True)]

    # ----------------------------------------------------------------------------------------------------------------
    # Weights

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """See `BackendProtocol.on_policy_updated`; nothing pauses, and requests in flight finish with old weights."""
        await self._allocated().publish(update.version)
        assert self._engine is not None
        self._engine.weight_version = self._version = update.version

    async def save_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.save_checkpoint`: weights stay on the server, and the folder stores their path."""
        policy = self._allocated()
        path = await policy.save(self.tinker.checkpoint_ttl_seconds)
        state = {"path": path, "step": self._step, **self._adapters()}
        (directory / CHECKPOINT).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        # One more than keep_checkpoints, because the newest checkpoint is not complete yet.
        states, kept = [*self._states, path], self.config.training.keep_checkpoints + 1
        self._states = [*await policy.forget(states[:-kept]), *states[-kept:]]

    async def load_checkpoint(self, directory: Path) -> None:
        """See `BackendProtocol.load_checkpoint`; includes the optimizer state."""
        state = _state_in(directory)
        try:
            await self._allocated().resume(state["path"], state["step"])
        except RunError as error:
            raise RunError(f"the checkpoint in {directory.parent.name} cannot be loaded: {error}") from None

    async def load_weights(self, directory: Path) -> None:
        """See `BackendProtocol.load_weights`; the server must still have the state that the other run saved."""
        state, own = _state_in(directory), self._adapters()
        before = {key: state[key] for key in own if key in state}  # earlier versions did not save the rank
        if any(own[key] != value for key, value in before.items()):
            raise ConfigError(
                f"training.init_from: the checkpoint has adapters with {_shown(before)}, and this run trains "
                f"{_shown(own)}; set tinker.rank and the model alike"
            )
        try:
            await self._allocated().start_from(state["path"])
        except RunError as error:
            raise RunError(f"training.init_from: the checkpoint cannot be loaded: {error}") from None

    def _adapters(self) -> dict[str, Any]:
        return {"base_model": self.tinker.base_model or self.config.model.path, "rank": self.tinker.rank}

    def state_dict(self) -> dict[str, Any]:
        """See `BackendProtocol.state_dict`."""
        return {"step": self._step, "states": list(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BackendProtocol.load_state_dict`."""
        self._step, self._states = int(state["step"]), list(state["states"])

    async def shutdown(self) -> None:
        """See `BackendProtocol.shutdown`."""
        if self._policy is not None:
            await self._policy.close()
        self._policy = self._engine = None

    def _allocated(self) -> RemotePolicy:
        if self._policy is None:
            raise RunError("backend 'tinker' has not been initialized")
        return self._policy


def server_of(config: RunConfig) -> ServerSettings:
    """Returns the server and the model of a run."""
    tinker, training = _settings(config), config.training
    is_synchronous = training.staleness_threshold == 0 and training.trigger_parameter_sync_step == 1
    on_skyrl: Samplers = "shared" if is_synchronous else "separate"
    return ServerSettings(
        base_url=tinker.address(),
        key=api_key(is_hosted=not tinker.address()),
        base_model=tinker.base_model or config.model.path,
        rank=tinker.rank,
        seed=training.seed if tinker.seed is None else tinker.seed,
        samplers=on_skyrl if tinker.scale() == "skyrl" else "snapshots",
        orders_requests=tinker.scale() == "hosted",
        future_timeout_seconds=tinker.future_timeout_seconds,
        reconnect_timeout_seconds=tinker.reconnect_timeout_seconds,
        recovery_every_steps=tinker.recovery_every_steps,
    )


def _state_in(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / CHECKPOINT).read_text(encoding="utf-8"))
    return state


def _shown(adapters: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value!r}" for key, value in adapters.items())


def _settings(config: RunConfig) -> TinkerConfig:
    return config.plugins.get("tinker") or TinkerConfig()


def _end(sample: TrainingSample) -> int:
    """Returns the end of the last sampled token; later tokens need not be sent."""
    return sample.turn_spans[-1][1] if sample.turn_spans else len(sample.token_ids)


def _datum(sample: TrainingSample, arrays: dict[str, Floats]) -> Any:
    """Converts a sample to inputs, targets, and arrays that are 0 everywhere but on sampled tokens."""
    ids = sample.token_ids[: _end(sample)].tolist()
    sampled = sample.loss_mask[1 : len(ids)]
    spread = {}
    for name, values in arrays.items():
        spread[name] = np.zeros(len(sampled), np.float32)
        spread[name][sampled] = values
    return sdk.datum(ids[:-1], ids[1:], spread)


def _sampled_logprobs(sample: TrainingSample, output: Any) -> Floats:
    """Returns ``(sampled_tokens,)`` log-probabilities, selected from the server's values for all positions."""
    given = np.array(output["logprobs"].data, np.float32)
    sampled = sample.loss_mask[1 : _end(sample)]
    if given.shape != sampled.shape:
        raise RunError(f"the server returned {len(given)} log-probabilities for {len(sampled)} positions")
    found: Floats = given[sampled]
    return found

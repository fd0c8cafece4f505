"""A compliant numpy engine and backend: a table of logits by the previous token."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import BackendProtocol, Capabilities, OptimizerStep, Policy, PolicyUpdate, UpdateResult
from rllm_core.config import RunConfig
from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.types import (
    FinishReason,
    Floats,
    SamplingParams,
    TokenIds,
    TokenInput,
    TokenOutput,
    TrainingSample,
    text_only,
    token_ids,
)
from rllm_devkit.scripted import ByteParser

Table = npt.NDArray[np.float64]

VOCABULARY = ByteParser.vocab_size


def initial_table() -> Table:
    table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
    table[:, ByteParser.END] += 3.0  # lets turns end
    return table


def log_softmax(logits: Table) -> Table:
    shifted: Table = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def token_logprobs(table: Table, ids: TokenIds, temperature: float) -> Table:
    """Returns ``(tokens - 1,)`` log-probabilities: all tokens but the first."""
    logprobs: Table = log_softmax(table[ids[:-1]] / temperature)[np.arange(len(ids) - 1), ids[1:]]
    return logprobs


class BigramEngine(RolloutEngine):
    """Samples from a bigram table; yields to the event loop at every token."""

    name: ClassVar[str] = "bigrams"
    computes_logprobs: ClassVar[bool] = True

    def __init__(self, table: Table | None = None, parser: BaseParser | None = None) -> None:
        self.table = initial_table() if table is None else table
        self.parser = parser or ByteParser()

    @property
    def supports_token_in_token_out(self) -> bool:
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        prompt = text_only(token_input, f"engine {self.name!r}")
        if int(prompt.max()) >= VOCABULARY:
            raise EngineError(f"token id {int(prompt.max())} is outside the vocabulary of {VOCABULARY}")
        rng, table, version = np.random.default_rng(seed), self.table, self.weight_version
        ids, logprobs, last = list[int](), list[float](), int(prompt[-1])
        while len(ids) < sampling_params.max_response_tokens:
            await asyncio.sleep(0)
            distribution = log_softmax(table[last] / (sampling_params.temperature or 1.0))
            last = self.choose(distribution, sampling_params, rng)
            ids.append(last)
            logprobs.append(float(distribution[last]))
            if last in sampling_params.stop_token_ids:
                break
        return self.output(ids, logprobs, sampling_params, version)

    def choose(self, distribution: Table, params: SamplingParams, rng: np.random.Generator) -> int:
        if params.temperature == 0 or params.top_k == 1:
            return int(distribution.argmax())
        return int(rng.choice(VOCABULARY, p=np.exp(distribution)))

    def output(self, ids: list[int], logprobs: list[float], params: SamplingParams, version: int) -> TokenOutput:
        return TokenOutput(
            token_ids=token_ids(ids),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=FinishReason.STOP if ids[-1] in params.stop_token_ids else FinishReason.LENGTH,
            weight_version=version,
        )

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        return token_logprobs(self.table, tokens, 1.0)[start - 1 :].astype(np.float32)


class BigramBackend(BackendProtocol[Sequence[TrainingSample]]):
    """Trains a bigram table with ``reinforce`` and Adam."""

    name: ClassVar[str] = "bigrams"
    declared: ClassVar[dict[str, Any]] = {}
    engine_class: ClassVar[type[BigramEngine]] = BigramEngine

    def __init__(self, config: RunConfig, plugins: Any = None) -> None:
        super().__init__(config, plugins)
        self.step = 0
        self.table = self.reference = np.empty(0)
        self.moments: list[Table] = []
        self.gradient = np.empty(0)
        self.engine: BigramEngine | None = None
        self.reference_engine: BigramEngine | None = None

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        honest: dict[str, Any] = {
            "losses": frozenset({"reinforce"}),
            "aggregations": AGGREGATIONS,
            "policies": frozenset({"current", "proximal", "reference"}),
            "deferred_normalisation": True,
            "deterministic": True,
        }
        return Capabilities(**{**honest, **cls.declared})

    def validate_config(self) -> list[str]:
        return []

    async def init_rollout_engine(self, parser: BaseParser) -> RolloutEngine:
        self.table, self.reference = initial_table(), initial_table()
        self.gradient, self.moments = np.zeros_like(self.table), [np.zeros_like(self.table) for _ in range(2)]
        self.engine = self.engine_class(self.table.copy(), parser)
        return self.engine

    async def init_reference_engine(self) -> RolloutEngine:
        assert self.engine is not None
        self.reference_engine = BigramEngine(self.reference.copy(), self.engine.parser)
        return self.reference_engine

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        return samples

    async def process_backend_batch(self, batch: Sequence[TrainingSample]) -> None:
        aggregation, temperature = aggregation_of(self.config), self.config.rollout.temperature
        for sample in batch:
            targets = np.flatnonzero(sample.loss_mask)
            weights = sample.advantages.astype(np.float64) * aggregation.token_weight(sample.sampled_tokens)
            for target, weight in zip(targets, weights, strict=True):
                before, token = sample.token_ids[target - 1], sample.token_ids[target]
                probabilities = np.exp(log_softmax(self.table[before] / temperature))
                self.gradient[before] += weight * probabilities / temperature
                self.gradient[before, token] -= weight / temperature

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        optimizer = self.config.optimizer
        gradient = self.gradient / aggregation_of(self.config).denominator(step)
        first, second = self.moments
        first += (1 - optimizer.beta1) * (gradient - first)
        second += (1 - optimizer.beta2) * (gradient**2 - second)
        self.step = step.step
        root = np.sqrt(second / (1 - optimizer.beta2**self.step)) + optimizer.epsilon
        self.table = self.table - optimizer.learning_rate * first / (1 - optimizer.beta1**self.step) / root
        self.gradient = np.zeros_like(gradient)
        return UpdateResult({"grad_norm": float(np.linalg.norm(gradient))})

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        if policy not in type(self).capabilities(self.config).policies:
            raise NotImplementedError(policy)
        table = self.reference if policy == "reference" else self.table
        temperature = self.config.rollout.temperature
        return [
            token_logprobs(table, sample.token_ids, temperature)[sample.loss_mask[1:]].astype(np.float32)
            for sample in samples
        ]

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        assert self.engine is not None
        self.engine.table, self.engine.weight_version = copy.copy(self.table), update.version

    async def save_checkpoint(self, directory: Path) -> None:
        np.savez(directory / "policy.npz", table=self.table, first=self.moments[0], second=self.moments[1])

    async def load_checkpoint(self, directory: Path) -> None:
        with np.load(directory / "policy.npz", allow_pickle=False) as saved:
            self.table, self.moments = saved["table"], [saved["first"], saved["second"]]

    async def load_weights(self, directory: Path) -> None:
        with np.load(directory / "policy.npz", allow_pickle=False) as saved:
            self.table = self.reference = saved["table"]
        if self.reference_engine is not None:
            self.reference_engine.table = self.reference.copy()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

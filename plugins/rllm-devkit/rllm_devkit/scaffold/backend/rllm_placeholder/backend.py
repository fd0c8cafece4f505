"""``placeholder``: trains a table of logits, one row per previous token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rllm_core.backend import BackendProtocol, Capabilities, OptimizerStep, Policy, PolicyUpdate, UpdateResult
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import (
    FinishReason,
    Floats,
    SamplingParams,
    TokenInput,
    TokenOutput,
    TrainingSample,
    text_only,
    token_ids,
)

Table = npt.NDArray[np.float64]

FILE = "table.npz"
MAX_TABLE_TOKENS = 4096
LETTERS = b"abcdefgh"
LETTER_BONUS, STOP_BONUS = 6.0, 7.0


def initial_table(parser: BaseParser) -> Table:
    """Returns ``(tokens, tokens)`` logits of the next token by the previous one; short words are likely.

    Raises:
        ConfigError: If the vocabulary is too large for a table.
    """
    spellings = parser.vocabulary().spellings
    if len(spellings) > MAX_TABLE_TOKENS:
        raise ConfigError(f"a table for {len(spellings)} tokens is too large; the limit is {MAX_TABLE_TOKENS}")
    letters = [token for token, spelling in enumerate(spellings) if spelling and spelling in LETTERS]
    table = np.zeros((len(spellings), len(spellings)))
    table[:, letters] += LETTER_BONUS
    table[:, list(parser.get_stop_token_ids())] += STOP_BONUS
    return table


def log_softmax(logits: Table) -> Table:
    """Returns ``(..., tokens)`` log-probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: Table = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


class PlaceholderEngine(RolloutEngine):
    """Samples from the table the backend published last."""

    name: ClassVar[str] = "placeholder"

    def __init__(self, table: Table, parser: BaseParser) -> None:
        self.table = table
        self.parser = parser
        self.vocabulary_size = len(table)

    @property
    def supports_token_in_token_out(self) -> bool:
        """True: takes token ids, returns token ids with log-probabilities."""
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion with a single weight version."""
        prompt = text_only(token_input, f"engine {self.name!r}")
        table, version, rng = self.table, self.weight_version, np.random.default_rng(seed)
        self.check_prompt(prompt, sampling_params.max_response_tokens)
        last, sampled, logprobs = int(prompt[-1]), list[int](), list[float]()
        for _ in range(sampling_params.max_response_tokens):
            await asyncio.sleep(0)  # lets other calls run, and stops a cancelled call
            distribution = log_softmax(table[last] / (sampling_params.temperature or 1.0))
            last = choose(distribution, sampling_params, rng)
            sampled.append(last)
            logprobs.append(float(distribution[last]))
            if last in sampling_params.stop_token_ids:
                break
        return TokenOutput(
            token_ids=token_ids(sampled),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=FinishReason.STOP if last in sampling_params.stop_token_ids else FinishReason.LENGTH,
            weight_version=version,
        )


def choose(distribution: Table, params: SamplingParams, rng: np.random.Generator) -> int:
    """Draws a token from ``(tokens,)`` log-probabilities, limited by ``top_k`` and ``top_p``."""
    likeliest = np.argsort(-distribution, kind="stable")
    probabilities = np.exp(distribution[likeliest])
    kept = 1 if params.temperature == 0 else params.top_k or len(likeliest)
    kept = min(kept, int((probabilities.cumsum() - probabilities < params.top_p).sum()))
    return int(rng.choice(likeliest[:kept], p=probabilities[:kept] / probabilities[:kept].sum()))


class PlaceholderBackend(BackendProtocol[Sequence[TrainingSample]]):
    """Sums the policy gradient of all sampled tokens over the passes of a step, and applies AdamW."""

    name: ClassVar[str] = "placeholder"

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        empty = np.zeros((0, 0))
        self.table, self.gradient, self.first_moment, self.second_moment = empty, empty, empty, empty
        self.engine: PlaceholderEngine | None = None

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        """Declares capabilities. Settings that need others are rejected before anything is allocated."""
        return Capabilities(
            losses=frozenset({"reinforce"}),
            aggregations=frozenset({"token_mean"}),
            policies=frozenset({"current", "proximal"}),
            deferred_normalisation=True,
            deterministic=True,
        )

    def validate_config(self) -> list[str]:
        """Rejects invalid settings that `capabilities` cannot express."""
        if self.config.model.path:
            raise ConfigError(f"backend {self.name!r} trains a table and takes no model; leave model.path out")
        return []

    async def init_rollout_engine(self, parser: BaseParser) -> RolloutEngine:
        """Allocates the table and its optimizer state."""
        self.table = initial_table(parser)
        self.gradient, self.first_moment, self.second_moment = (np.zeros_like(self.table) for _ in range(3))
        self.engine = PlaceholderEngine(self.table, parser)
        return self.engine

    def transform_to_backend_batch(self, samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        """Returns the samples unchanged. Pad or pack them here for a real model."""
        return samples

    async def process_backend_batch(self, batch: Sequence[TrainingSample]) -> None:
        """Adds the gradient of ``-advantage * log-probability`` of every sampled token."""
        temperature = self.config.rollout.temperature
        for sample in batch:
            places = np.flatnonzero(sample.loss_mask)
            before, sampled = sample.token_ids[places - 1], sample.token_ids[places]
            slopes = np.exp(log_softmax(self.table[before] / temperature))
            slopes[np.arange(len(sampled)), sampled] -= 1.0
            np.add.at(self.gradient, before, slopes * sample.advantages[:, None] / temperature)

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        """Divides by the tokens of the whole step, clips, and takes one AdamW step (arXiv 1711.05101)."""
        optimizer, rate = self.config.optimizer, self.config.optimizer.learning_rate_at(step.step, step.total_steps)
        gradient = self.gradient / max(1, step.sampled_tokens)
        norm = float(np.linalg.norm(gradient))
        gradient *= min(1.0, optimizer.max_grad_norm / max(norm, optimizer.epsilon))
        self.first_moment = optimizer.beta1 * self.first_moment + (1 - optimizer.beta1) * gradient
        self.second_moment = optimizer.beta2 * self.second_moment + (1 - optimizer.beta2) * gradient**2
        mean = self.first_moment / (1 - optimizer.beta1**step.step)
        root = np.sqrt(self.second_moment / (1 - optimizer.beta2**step.step))
        # A new table, because the engine may still be sampling from the old one.
        self.table = self.table * (1 - rate * optimizer.weight_decay) - rate * mean / (root + optimizer.epsilon)
        self.gradient = np.zeros_like(self.gradient)
        return UpdateResult({"grad_norm": norm, "learning_rate": rate})

    async def compute_logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """Returns ``(sampled_tokens,)`` per sample. Weights change once per step, so current equals proximal."""
        if policy == "reference":
            raise NotImplementedError(f"backend {self.name!r} has no reference model")
        found = []
        for sample in samples:
            places = np.flatnonzero(sample.loss_mask)
            logprobs = log_softmax(self.table[sample.token_ids[places - 1]] / self.config.rollout.temperature)
            found.append(logprobs[np.arange(len(places)), sample.token_ids[places]].astype(np.float32))
        return found

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """Gives the engine the new weights; running calls finish with the old ones."""
        assert self.engine is not None, "init_rollout_engine() comes first"
        self.engine.table, self.engine.weight_version = self.table, update.version

    async def save_checkpoint(self, directory: Path) -> None:
        """Saves everything the next step depends on."""
        np.savez(directory / FILE, table=self.table, first=self.first_moment, second=self.second_moment)

    async def load_checkpoint(self, directory: Path) -> None:
        """Loads a checkpoint and discards the accumulated gradient."""
        with np.load(directory / FILE, allow_pickle=False) as saved:
            self.table, self.first_moment, self.second_moment = saved["table"], saved["first"], saved["second"]
        self.gradient = np.zeros_like(self.table)

    async def load_weights(self, directory: Path) -> None:
        """Loads only the weights of another run's checkpoint (``training.init_from``)."""
        with np.load(directory / FILE, allow_pickle=False) as saved:
            self.table = saved["table"]

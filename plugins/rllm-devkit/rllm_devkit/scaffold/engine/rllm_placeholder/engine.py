"""``placeholder``: samples from a table of logits with one row per previous token."""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from rllm_core.config import RunConfig, Section
from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.types import (
    FinishReason,
    Floats,
    SamplingParams,
    TokenIds,
    TokenInput,
    TokenOutput,
    text_only,
    token_ids,
)

Logits = npt.NDArray[np.float64]

MAX_TABLE_TOKENS = 4096


class PlaceholderConfig(Section):
    """Section ``[placeholder]`` of the run file."""

    stop_bonus: Annotated[float, Field(description="Bonus for logits of stop tokens. Higher values stop sooner.")] = 3.0


class PlaceholderEngine(RolloutEngine):
    """Random policy whose next token depends on the previous one.

    Args:
        parser: Parser that defines the vocabulary and stop tokens.
        config: Section of the run file.
    """

    name: ClassVar[str] = "placeholder"
    config_model: ClassVar[type[Section]] = PlaceholderConfig
    computes_logprobs: ClassVar[bool] = True

    def __init__(self, parser: BaseParser, config: PlaceholderConfig | None = None) -> None:
        self.parser = parser
        self.config = config if config is not None else PlaceholderConfig()
        tokens = len(parser.vocabulary().spellings)
        if tokens > MAX_TABLE_TOKENS:
            raise EngineError(f"a table for {tokens} tokens is too large; the limit is {MAX_TABLE_TOKENS}")
        self.logits: Logits = np.random.default_rng(0).normal(size=(tokens, tokens))
        self.logits[:, list(parser.get_stop_token_ids())] += self.config.stop_bonus
        self.vocabulary_size = tokens

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> PlaceholderEngine:
        """Builds the engine for ``rllm-core eval WORKFLOW --engine placeholder``."""
        return cls(parser, config.plugins.get(cls.name))

    @property
    def supports_token_in_token_out(self) -> bool:
        """True: takes token ids, returns token ids with log-probabilities."""
        return True

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion with a single weight version."""
        prompt = text_only(token_input, f"engine {self.name!r}")
        self.check_prompt(prompt, sampling_params.max_response_tokens)
        logits, version, rng = self.logits, self.weight_version, np.random.default_rng(seed)
        last, sampled, logprobs = int(prompt[-1]), list[int](), list[float]()
        for _ in range(sampling_params.max_response_tokens):
            await asyncio.sleep(0)  # lets other calls run, and stops a cancelled call
            distribution = log_softmax(logits[last] / (sampling_params.temperature or 1.0))
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

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        """Returns ``(tokens - start,)`` log-probabilities of ``tokens[start:]`` at temperature 1, for distillation."""
        self.check_prompt(tokens, 0)
        before, scored = tokens[start - 1 : -1], tokens[start:]
        return log_softmax(self.logits[before])[np.arange(len(scored)), scored].astype(np.float32)


def log_softmax(logits: Logits) -> Logits:
    """Returns ``(..., tokens)`` log-probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def choose(distribution: Logits, params: SamplingParams, rng: np.random.Generator) -> int:
    """Draws a token from ``(tokens,)`` log-probabilities, limited by ``top_k`` and ``top_p``."""
    likeliest = np.argsort(-distribution, kind="stable")
    probabilities = np.exp(distribution[likeliest])
    kept = 1 if params.temperature == 0 else params.top_k or len(likeliest)
    kept = min(kept, int((probabilities.cumsum() - probabilities < params.top_p).sum()))
    return int(rng.choice(likeliest[:kept], p=probabilities[:kept] / probabilities[:kept].sum()))

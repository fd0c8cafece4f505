"""Sampling parameters, and completions as engines return them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from rllm_core.media import PlacedMedia
from rllm_core.messages import JsonDict
from rllm_core.records import Count, Record, check_lengths
from rllm_core.tokens import LogprobsField, TokenIds, TokenIdsField


class FinishReason(StrEnum):
    """Why a completion ended: a sampled stop token, the token limit, or an abort by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingParams(Record):
    """Sampling parameters of one completion.

    Attributes:
        temperature: Divisor of the logits; 0 means greedy. Log-probabilities refer to the distribution after the
            temperature (without it when greedy) and *before* ``top_k`` and ``top_p``.
        top_p: Sample from the smallest set of tokens with at least this total probability.
        top_k: Sample from the k most likely tokens. 0 disables the limit.
        max_response_tokens: Maximum tokens of the completion, including the stop token.
        stop_token_ids: Tokens that end the completion when sampled. The completion includes the sampled one.
        stop_texts: Texts that end the completion. Completers cut it after the token that completes one of them; engines
            need not know them, but may stop there.
    """

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Count = 0
    max_response_tokens: Annotated[int, Field(strict=True, ge=1)] = 1024
    stop_token_ids: tuple[Count, ...] = ()
    stop_texts: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class _Sampled(Record):
    """Common fields of `TokenOutput` and `ModelOutput`."""

    logprobs: LogprobsField | None = None
    finish_reason: FinishReason
    weight_version: Count
    newest_weight_version: Count | None = None

    def _check_sampled(self, completion_ids: TokenIds) -> None:
        check_lengths(len(completion_ids), "tokens", {"log-probabilities": self.logprobs})
        if self.newest_weight_version is not None and self.newest_weight_version < self.weight_version:
            raise ValueError(
                f"the newest weight version {self.newest_weight_version} is older than the oldest {self.weight_version}"
            )


class TokenOutput(_Sampled):
    """Completion exactly as an engine sampled it.

    Attributes:
        token_ids: ``(completion_tokens,)`` ids, including the stop token if one was sampled.
        logprobs: ``(completion_tokens,)`` log-probabilities, or None if the engine has none. Never padded.
        weight_version: Weight version that sampled it; the oldest one if the weights changed meanwhile.
        newest_weight_version: Newest weight version that sampled it, if different.
    """

    token_ids: TokenIdsField

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        self._check_sampled(self.token_ids)
        return self


class ModelOutput(_Sampled):
    """One completion, as tokens and as a message."""

    message: JsonDict
    prompt_ids: TokenIdsField
    prompt_media: tuple[PlacedMedia, ...] = ()
    completion_ids: TokenIdsField

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        self._check_sampled(self.completion_ids)
        return self

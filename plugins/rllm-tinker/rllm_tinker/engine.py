"""Rollout engine: samples whole groups in one request, with the live weight version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rllm_core.engine import EngineBusy, EngineError, RolloutEngine, derive_seed
from rllm_core.errors import RunError
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
from rllm_tinker import sdk
from rllm_tinker.remote import RemotePolicy, Sampler
from rllm_tinker.sdk import Busy, Lost

# Share of the core's request timeout, so that the engine notices a timeout first and reconnects.
DEADLINE_SHARE = 0.95
MAX_SEED = 2**31 - 1


class TinkerEngine(RolloutEngine):
    """Samples from a policy on a server.

    The sampler that receives a request also completes it, and sets its weight version. New weights apply from the next
    request on, so nothing pauses (``training.partial_rollout``). If the server loses a request, its rollouts end as
    ``engine_error``, and the policy is restored before the next request.

    Args:
        policy: Policy on the server.
        parser: Parser of the prompts.
        vocabulary_size: Upper bound of token ids, exclusive; some servers loop forever on ids outside it.
        request_timeout_seconds: The core's timeout of a request.
    """

    name: ClassVar[str] = "tinker"
    computes_logprobs: ClassVar[bool] = True

    def __init__(
        self,
        policy: RemotePolicy,
        parser: BaseParser | None,
        *,
        vocabulary_size: int,
        request_timeout_seconds: float,
    ) -> None:
        self.policy = policy
        self.parser = parser
        self.vocabulary_size: int = vocabulary_size
        self._deadline_seconds = DEADLINE_SHARE * request_timeout_seconds

    @property
    def supports_token_in_token_out(self) -> bool:
        """Always true."""
        return True

    @property
    def max_model_tokens(self) -> int | None:
        """Maximum length of prompt plus completion, if the server reports it."""
        return self.policy.max_model_tokens

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """See `RolloutEngine`."""
        outputs = await self.get_token_outputs_from_token_input(
            token_input, sampling_params=sampling_params, seeds=(seed,), is_validation=is_validation
        )
        return outputs[0]

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """See `RolloutEngine`; sends one request, with one seed derived from all seeds."""
        prompt_ids = text_only(token_input, f"engine {self.name!r}")
        self.check_prompt(prompt_ids, sampling_params.max_response_tokens)
        settings = sdk.sampling_params(
            max_tokens=sampling_params.max_response_tokens,
            seed=derive_seed(*seeds) % MAX_SEED,
            stop=sampling_params.stop_token_ids,
            temperature=sampling_params.temperature,
            top_p=sampling_params.top_p,
            top_k=sampling_params.top_k,
        )

        def ask(sampler: Sampler) -> Any:
            return sampler.client.sample(sdk.prompt(prompt_ids.tolist()), len(seeds), settings)

        sampler, found = await self._answer("sample", ask)
        if len(found.sequences) != len(seeds):
            raise EngineError(f"the server returned {len(found.sequences)} completions instead of {len(seeds)}")
        return [self._output(sequence, sampler.version) for sequence in found.sequences]

    def _output(self, sequence: Any, version: int) -> TokenOutput:
        ids = token_ids(sequence.tokens)
        if len(ids) and int(ids.max()) >= self.vocabulary_size:
            raise EngineError(
                f"the server sampled token id {int(ids.max())}, but the tokenizer has {self.vocabulary_size} tokens"
            )
        return TokenOutput(
            token_ids=ids,
            logprobs=None if sequence.logprobs is None else np.array(sequence.logprobs, np.float32),
            finish_reason=FinishReason.STOP if sequence.stop_reason == "stop" else FinishReason.LENGTH,
            weight_version=version,
        )

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        """See `RolloutEngine`."""
        self.check_prompt(tokens, 0)

        def ask(sampler: Sampler) -> Any:
            return sampler.client.compute_logprobs(sdk.prompt(tokens.tolist()))

        _, found = await self._answer("compute_logprobs", ask)
        return sdk.prompt_logprobs(found, len(tokens))[start - 1 :]

    async def _answer(self, what: str, ask: Any) -> tuple[Sampler, Any]:
        await self.policy.ready()
        sampler = self.policy.sampler
        if sampler is None:
            raise RunError(f"engine {self.name!r} cannot sample before weights are published")
        try:
            with sampler:
                return sampler, await sdk.answer(self._deadline_seconds, what, ask(sampler))
        except asyncio.CancelledError:
            self.policy.doubt()
            raise
        except RunError as error:
            raise EngineError(str(error)) from None  # the server rejected this request only
        except Busy as busy:
            raise EngineBusy(str(busy)) from None
        except Lost as lost:
            reason = lost
        await self.policy.recover(sampler, reason)
        raise EngineError(f"the server lost a request: {reason}")

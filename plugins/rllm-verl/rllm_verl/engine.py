"""Rollout engine: token ids in, token ids out, through verl's client to its vLLM servers."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from ray.exceptions import RayActorError, RayError, RayTaskError

from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.types import (
    FinishReason,
    SamplingParams,
    TokenInput,
    TokenOutput,
    text_only,
    token_ids,
)
from rllm_verl.cluster import reason
from rllm_verl.routing import ConversationRoutes

ABORTED = ("abort", "aborted")
MAX_SEED = 2**31 - 1
# vLLM's error for a server whose inner process has died.
DEAD_ENGINE = "EngineDeadError"


class VerlEngine(RolloutEngine):
    """Samples from verl's servers.

    If the client resumes (``training.partial_rollout``), a completion interrupted by a weight sync continues with the
    new weights and records its oldest and newest weight version. An aborted completion is an `EngineError` and is
    retried. A server that died ends the run with an error.

    Args:
        client: verl's ``LLMServerClient``, or its variant that resumes.
        parser: Parser of the prompts; the engine itself does not parse, so any model family works.
        vocabulary_size: Upper bound of token ids, exclusive.
        max_model_tokens: Maximum length of prompt plus completion.
        sends_seeds: Whether requests carry seeds. If not, servers use their own random numbers.
    """

    name: ClassVar[str] = "verl"
    too_long_advice: ClassVar[str] = (
        "raise verl.max_model_tokens, lower rollout.max_response_tokens or shorten the prompt"
    )

    def __init__(
        self,
        client: Any,
        parser: BaseParser | None,
        *,
        vocabulary_size: int,
        max_model_tokens: int,
        sends_seeds: bool,
    ) -> None:
        self.client = client
        self.parser = parser
        self.vocabulary_size = vocabulary_size
        self._max_model_tokens = max_model_tokens
        self._sends_seeds = sends_seeds
        self._conversations = ConversationRoutes()

    @property
    def supports_token_in_token_out(self) -> bool:
        """Always true."""
        return True

    @property
    def max_model_tokens(self) -> int:
        """Maximum length of prompt plus completion that the servers were started with."""
        return self._max_model_tokens

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """See `RolloutEngine`."""
        prompt_ids = text_only(token_input, f"engine {self.name!r}")
        self.check_prompt(prompt_ids, sampling_params.max_response_tokens)
        routing_id = self._conversations.routing_id(prompt_ids, self.weight_version)
        try:
            found = await self.client.generate(
                routing_id, prompt_ids=prompt_ids.tolist(), sampling_params=self._settings(sampling_params, seed)
            )
        except RayTaskError as error:  # raised within a server
            if DEAD_ENGINE in type(error.cause).__name__ or DEAD_ENGINE in str(error):
                raise RunError(f"a vLLM server died: {reason(error)}") from error
            raise EngineError(f"a vLLM server rejected the request: {reason(error)}") from error
        except RayActorError as error:
            raise RunError(f"a vLLM server died: {reason(error)}") from error
        except RayError as error:
            raise EngineError(f"no response from a vLLM server: {reason(error)}") from error
        output = self._output(found, sampling_params)
        self._conversations.remember(routing_id, prompt_ids, output.token_ids)
        return output

    def _settings(self, params: SamplingParams, seed: int) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "max_tokens": params.max_response_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # only the parser's stop tokens end a completion
            "logprobs": True,
            "detokenize": False,  # nothing reads the text
        }
        if self._sends_seeds:
            settings["seed"] = seed % MAX_SEED
        return settings

    def _output(self, found: Any, params: SamplingParams) -> TokenOutput:
        ids = token_ids(found.token_ids)
        if found.stop_reason in ABORTED or len(ids) == 0:
            raise EngineError("a vLLM server aborted the request")
        oldest, newest = (found.extra_fields[f"{end}_global_steps"] for end in ("min", "max"))
        if oldest is None:
            raise RunError("a vLLM server sampled before weights were published")
        return TokenOutput(
            token_ids=ids,
            logprobs=np.array(found.log_probs, np.float32),
            finish_reason=FinishReason.STOP if int(ids[-1]) in params.stop_token_ids else FinishReason.LENGTH,
            weight_version=oldest,
            newest_weight_version=newest if newest != oldest else None,
        )

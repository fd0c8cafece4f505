"""Calls an engine for the checks of engines and backends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rllm_core.engine import EngineBusy, RolloutEngine
from rllm_core.types import Floats, SamplingParams, TokenIds, TokenInput, TokenOutput, is_id_array
from rllm_devkit.checks.results import NotApplicable, Violation

ResultT = TypeVar("ResultT")

BUSY_PAUSE_SECONDS = 0.5


@dataclass
class EngineProbe:
    """An engine under test, its prompts and its first completions.

    Attributes:
        answers: Completions per prompt, sampled by the first of `ENGINE_CHECKS`; empty until it passes.
    """

    engine: RolloutEngine
    prompts: Sequence[TokenIds]
    params: SamplingParams
    samples: int
    vocabulary_size: int | None
    takes_media: bool
    deterministic: bool
    logprob_tolerance: float
    request_timeout_seconds: float
    answers: list[list[TokenOutput]] = field(default_factory=list)

    def params_with(self, **changes: Any) -> SamplingParams:
        """Returns the default parameters with changes."""
        return self.params.model_copy(update=changes)

    async def group(
        self, prompt: TokenInput, seeds: Sequence[int], params: SamplingParams | None = None
    ) -> list[TokenOutput]:
        """Samples several completions of a prompt in one call."""
        outputs = await self.within(
            lambda: self.engine.get_token_outputs_from_token_input(
                prompt, sampling_params=params or self.params, seeds=seeds
            )
        )
        if not isinstance(outputs, list) or len(outputs) != len(seeds):
            raise Violation(f"{len(seeds)} completions were requested, but the call returned {outputs!r:.200}")
        return [self._output(output) for output in outputs]

    async def single(
        self, prompt: TokenInput, seed: int, params: SamplingParams | None = None, *, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion."""
        return self._output(
            await self.within(
                lambda: self.engine.get_token_output_from_token_input(
                    prompt, sampling_params=params or self.params, seed=seed, is_validation=is_validation
                )
            )
        )

    @staticmethod
    def _output(output: Any) -> TokenOutput:
        if not isinstance(output, TokenOutput) or not is_id_array(output.token_ids):
            raise Violation(
                f"the engine must return a TokenOutput with an int32 array of token ids, got {output!r:.200}"
            )
        if len(output.token_ids) == 0:
            raise Violation("a completion is empty; it needs at least one token, such as the stop token")
        return output

    async def scores(self, tokens: TokenIds, start: int) -> Floats:
        """Returns the ``(tokens - start,)`` result of `RolloutEngine.compute_logprobs`."""
        scores = np.asarray(await self.within(lambda: self.engine.compute_logprobs(tokens, start=start)))
        if scores.shape != (len(tokens) - start,):
            raise Violation(f"compute_logprobs returned shape {scores.shape} for {len(tokens) - start} tokens")
        return scores

    async def within(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Awaits ``call`` within the timeout, repeating it while the engine is busy, as the core does."""
        limit = self.request_timeout_seconds
        try:
            async with asyncio.timeout(limit) as deadline:
                while True:
                    try:
                        return await call()
                    except EngineBusy as busy:
                        await asyncio.sleep(max(BUSY_PAUSE_SECONDS, busy.retry_after_seconds))
        except TimeoutError:
            if deadline.expired():
                raise Violation(f"no answer within {limit:g} s") from None
            raise

    def sampled(self) -> list[tuple[TokenIds, TokenOutput]]:
        """Returns the first completions with their prompts.

        Raises:
            NotApplicable: If there are no completions yet.
        """
        if not self.answers:
            raise NotApplicable("nothing could be sampled")
        pairs = zip(self.prompts, self.answers, strict=True)
        return [(prompt, output) for prompt, outputs in pairs for output in outputs]

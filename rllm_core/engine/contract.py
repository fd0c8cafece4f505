"""Contract of a rollout engine: token ids in, token ids out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rllm_core.parser.checked_calls import parsed, rendered
from rllm_core.types import (
    Floats,
    MessageLike,
    ModelOutput,
    PlacedMedia,
    SamplingParams,
    TerminationReason,
    TokenIds,
    TokenInput,
    TokenOutput,
    with_media,
)

if TYPE_CHECKING:
    from rllm_core.config import RunConfig
    from rllm_core.parser import BaseParser, ToolSpec


class EngineError(RuntimeError):
    """The engine failed to sample. The rollout ends as ``engine_error`` and may be retried."""


class EngineBusy(EngineError):
    """The engine is temporarily unavailable (429, 5xx, a dropped connection). The same request may be sent again.

    Args:
        detail: The engine's own message.
        retry_after_seconds: Time to wait before the next request, if the engine asks for it.
    """

    def __init__(self, detail: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class PromptTooLong(EngineError):
    """The prompt and the longest completion do not fit the model. Completers end the rollout by it."""


class Terminated(Exception):
    """Ends a rollout early with a reason. Raised by completers, and by workflows that stop on purpose."""

    def __init__(self, reason: TerminationReason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class TokenSource(Protocol):
    """Source of a completer's tokens: an engine, or the core's request merger in front of one."""

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion."""
        ...


class RolloutEngine(ABC):
    """Samples from the policy.

    An engine does not train, and it parses only through its `BaseParser`. Every output carries the weight version that
    sampled it. An engine may be called concurrently from one event loop. Each call states whether it is for validation,
    which is never engine state.

    Attributes:
        name: Name that selects the engine; used in errors.
        parser: Parser whose tokens this engine takes, or None.
        weight_version: Version of the weights that the engine samples from. The backend sets it in `on_policy_updated`.
        vocabulary_size: Upper limit (exclusive) for token ids in prompts, or None if unknown.
        computes_logprobs: Whether the engine implements `compute_logprobs`, which a teacher needs.
        too_long_advice: Advice for errors about a prompt that does not fit.
    """

    name: ClassVar[str]
    computes_logprobs: ClassVar[bool] = False
    too_long_advice: ClassVar[str] = "lower rollout.max_response_tokens or shorten the prompt"
    parser: BaseParser | None = None
    weight_version: int = 0
    vocabulary_size: int | None = None

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> RolloutEngine:
        """Builds an engine that needs no backend, for ``rllm-core eval WORKFLOW --engine NAME``.

        Engines provided by the hook ``rollout_engines`` override this. A backend builds its own engine itself.

        Args:
            config: The run file. ``config.model.path`` is the model; for a teacher's engine, it is the teacher.
                ``config.plugins.get(cls.name)`` is the engine's section, validated by the ``config`` of its record. It
                is None if the engine has no section, or if another engine creates this one without it.
            parser: Parser of that model.
        """
        raise NotImplementedError(f"{cls.__name__} belongs to a backend and cannot be used without it")

    @property
    def supports_token_in_token_out(self) -> bool:
        """Whether the engine takes prompts and returns completions as token ids, with log-probabilities."""
        return False

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        return self.parser.tokenizer if self.parser is not None else None

    @property
    def max_model_tokens(self) -> int | None:
        """Maximum length of prompt plus completion, in tokens, or None if unlimited."""
        return None

    def check_prompt(self, prompt_ids: TokenIds, new_tokens: int) -> None:
        """Rejects prompts that the model cannot take. Engines call this before they sample or score.

        Args:
            prompt_ids: ``(tokens,)`` prompt.
            new_tokens: Maximum number of tokens to sample.

        Raises:
            EngineError: If the prompt is empty, or contains an id outside the vocabulary.
            PromptTooLong: If the prompt is too long.
        """
        if len(prompt_ids) == 0:
            raise EngineError(f"engine {self.name!r} needs at least one prompt token")
        size, longest = self.vocabulary_size, self.max_model_tokens
        if size is not None and int(prompt_ids.max()) >= size:
            raise EngineError(f"token id {int(prompt_ids.max())} is outside the vocabulary of {size} tokens")
        if longest is not None and len(prompt_ids) + new_tokens > longest:
            raise PromptTooLong(
                f"{len(prompt_ids)} prompt tokens and up to {new_tokens} new ones do not fit the model's {longest} "
                f"positions; {self.too_long_advice}"
            )

    @abstractmethod
    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Samples one completion for a prompt of token ids.

        Args:
            token_input: The prompt. Text-only engines reject media chunks.
            sampling_params: Sampling parameters, including stop tokens.
            seed: Seed. The same seed, weights and prompt give the same completion if the engine can guarantee that.
            is_validation: Whether the call is for validation. Affects accounting and priorities, not the sampling.

        Raises:
            EngineBusy: If the same request may be sent again later, which the core does.
            EngineError: If the engine failed to sample.
        """

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """Samples ``len(seeds)`` completions for one prompt. Engines that can share the prefill override this."""
        calls = [
            self.get_token_output_from_token_input(
                token_input, sampling_params=sampling_params, seed=seed, is_validation=is_validation
            )
            for seed in seeds
        ]
        return [await calls[0]] if len(calls) == 1 else list(await asyncio.gather(*calls))

    async def compute_logprobs(self, tokens: TokenIds, *, start: int) -> Floats:
        """Scores given tokens. Engines that implement this also set ``computes_logprobs``.

        Args:
            tokens: ``(tokens,)`` prompt and the tokens after it.
            start: Position of the first token to score, at least 1.

        Returns:
            ``(tokens - start,)`` natural-log probabilities of ``tokens[start:]`` at temperature 1, each given all
            tokens before it. NaN, never another number, for a token whose log-probability the engine does not have.

        Raises:
            EngineBusy: If the same call may be made again later, which the core does.
            EngineError: If the engine failed to score.
        """
        raise NotImplementedError(f"engine {self.name!r} does not compute log-probabilities of given tokens")

    async def get_model_response(
        self,
        messages: Sequence[MessageLike],
        *,
        sampling_params: SamplingParams,
        seed: int,
        tools: Sequence[ToolSpec] | None = None,
        is_validation: bool = False,
    ) -> ModelOutput:
        """Samples the next message: renders, samples, assembles. Engines that take messages only override this."""
        if self.parser is None:
            raise EngineError(f"engine {self.name!r} has no parser to render messages with")
        prompt_ids = rendered(self.parser, messages, tools=tools)
        media = self.parser.place_media(prompt_ids, messages)
        output = await self.get_token_output_from_token_input(
            with_media(prompt_ids, media), sampling_params=sampling_params, seed=seed, is_validation=is_validation
        )
        return self.assemble_model_output(prompt_ids, output, tools=tools, media=media)

    def assemble_model_output(
        self,
        prompt_ids: TokenIds,
        token_output: TokenOutput,
        *,
        tools: Sequence[ToolSpec] | None = None,
        media: tuple[PlacedMedia, ...] = (),
    ) -> ModelOutput:
        """Combines a prompt (with placeholders for media) and its sampled completion into one output."""
        if self.parser is None:
            raise EngineError(f"engine {self.name!r} has no parser to read completions with")
        said = parsed(self.parser, token_output.token_ids, prompt_ids=prompt_ids, tools=tools)
        return ModelOutput(
            message=said.to_message(),
            prompt_ids=prompt_ids,
            prompt_media=media,
            completion_ids=token_output.token_ids,
            logprobs=token_output.logprobs,
            finish_reason=token_output.finish_reason,
            weight_version=token_output.weight_version,
            newest_weight_version=token_output.newest_weight_version,
        )

    async def wake_up(self) -> None:  # noqa: B027 - most engines are always awake
        """Prepares for sampling (colocated engines load their weights and cache)."""

    async def sleep(self) -> None:  # noqa: B027
        """Frees memory until the next `wake_up`."""


def described(engine: RolloutEngine) -> str:
    """Returns the name and the class of an engine, for messages."""
    return f"engine {getattr(engine, 'name', 'unnamed')!r} ({type(engine).__name__})"

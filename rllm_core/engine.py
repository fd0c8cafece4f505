"""Rollout engines (token ids in, token ids out), and the completers through which a workflow calls them."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rllm_core.errors import ConfigError
from rllm_core.scope import RolloutEnded, RolloutScope
from rllm_core.types import (
    FinishReason,
    Floats,
    MessageLike,
    MessageView,
    ModelOutput,
    PlacedMedia,
    SamplingParams,
    Step,
    TerminationReason,
    TokenIds,
    TokenInput,
    TokenLog,
    TokenOutput,
    new_id,
    snapshot,
    starts_with,
    token_ids,
    with_media,
)

if TYPE_CHECKING:
    from rllm_core.config import RunConfig
    from rllm_core.parser import BaseParser, ToolSpec


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in ``[0, 2**63)`` that depends on each part (run, task, rollout, turn), its type and the order."""
    named = repr([part if isinstance(part, str) else int(part) for part in parts])
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
    sampled it. An engine may be called concurrently from one event loop. Each call says whether it is for validation;
    that is never engine state.

    Attributes:
        name: Name by which it is selected; used in errors.
        parser: Parser whose tokens this engine takes, or None.
        weight_version: Version of the weights it samples from. The backend sets it in `on_policy_updated`.
        vocabulary_size: Upper limit (exclusive) for token ids in prompts, or None if unknown.
        computes_logprobs: Whether it implements `compute_logprobs`, which a teacher needs.
        too_long_advice: What to do about a prompt that does not fit, for errors.
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
        """Whether it takes prompts as token ids, and returns completions as token ids with log-probabilities."""
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
            EngineError: If the prompt is empty, contains an id outside the vocabulary, or is too long.
        """
        if len(prompt_ids) == 0:
            raise EngineError(f"engine {self.name!r} needs at least one prompt token")
        size, longest = self.vocabulary_size, self.max_model_tokens
        if size is not None and int(prompt_ids.max()) >= size:
            raise EngineError(f"token id {int(prompt_ids.max())} is outside the vocabulary of {size} tokens")
        if longest is not None and len(prompt_ids) + new_tokens > longest:
            raise EngineError(
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
        if len(seeds) == 1:
            return [
                await self.get_token_output_from_token_input(
                    token_input, sampling_params=sampling_params, seed=seeds[0], is_validation=is_validation
                )
            ]
        return list(
            await asyncio.gather(
                *(
                    self.get_token_output_from_token_input(
                        token_input, sampling_params=sampling_params, seed=seed, is_validation=is_validation
                    )
                    for seed in seeds
                )
            )
        )

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
        prompt_ids = token_ids(self.parser.render(messages, tools=tools))
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
        parsed = self.parser.parse_completion(token_output.token_ids, prompt_ids=prompt_ids, tools=tools)
        return ModelOutput(
            message=parsed.to_message(),
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


class Completer:
    """One conversation with the model, message by message.

    This plain completer renders every turn from scratch through the engine's `get_model_response`. Workflows normally
    get a `TITOCompleter`; both have the same two methods.

    Args:
        engine: Engine to call.
        sampling_params: Defaults for every turn. If they contain no stop tokens, the engine's parser supplies them.
        seed: Root of this conversation's seeds. Turn ``n`` samples with ``derive_seed(seed, n)``, also on a retry. An
            environment with randomness should derive its seeds with ``derive_seed(completer.seed, "environment")``, so
            that a rollout can be repeated.
        is_validation: Passed to the engine with every call.
        max_prompt_tokens: Maximum prompt length. Longer prompts end the rollout as ``max_prompt_tokens_exceeded``.
        scope: Lifetime of the rollout, shared with its forks. Defaults to a scope that does not end.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        is_validation: bool = False,
        max_prompt_tokens: int | None = None,
        scope: RolloutScope | None = None,
    ) -> None:
        sampling_params = sampling_params or SamplingParams()
        if not sampling_params.stop_token_ids and engine.parser is not None:
            stop_ids = tuple(engine.parser.get_stop_token_ids())
            sampling_params = sampling_params.model_copy(update={"stop_token_ids": stop_ids})
        self.engine = engine
        self.sampling_params = sampling_params
        self.is_validation = is_validation
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        self.scope = scope if scope is not None else RolloutScope()
        self._turns = 0
        self._forks = 0
        self._last: Step | None = None
        self._tokens: TokenLog | None = None
        self._is_busy = False

    def fork(self) -> Completer:
        """Opens another conversation in the same rollout (another agent, a judge, a parallel attempt)."""
        self._forks += 1
        return type(self)(
            self.engine,
            sampling_params=self.sampling_params,
            seed=derive_seed(self.seed, "fork", self._forks),
            is_validation=self.is_validation,
            max_prompt_tokens=self.max_prompt_tokens,
            scope=self.scope,
        )

    async def complete(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        max_response_tokens: int | None = None,
    ) -> Step:
        """Samples the next assistant message.

        Returns:
            The step. Append ``step.response`` to the conversation before the next call.

        Raises:
            ConfigError: If tools are offered, but the parser cannot read tool calls of this model.
            EngineError: If the engine failed.
            Terminated: If the prompt is longer than allowed.
            RolloutEnded: If the rollout has ended, or ends during the call.
        """
        self._check_tools(tools)
        if self._is_busy:
            raise RuntimeError("a completer handles one call at a time; use completer.fork() for another conversation")
        scope = self.scope
        task = scope.begin()
        self._is_busy = True
        try:
            step = await self._complete(messages, tools, self._params(max_response_tokens))
        except asyncio.CancelledError:
            if scope.was_stopped(task):
                raise RolloutEnded(f"{scope.name} ended while the model was answering") from None
            raise
        finally:
            self._is_busy = False
            scope.end(task)
        scope.keep(step)
        return step

    def _check_tools(self, tools: Sequence[ToolSpec] | None) -> None:
        """Rejects tools if the parser cannot read tool calls: rollouts would silently go without their rewards."""
        parser = self.engine.parser
        if not tools or parser is None or parser.supports_tools:
            return
        names = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
        raise ConfigError(
            f"the workflow offers tools ({names}), but parser {parser.name!r} cannot read tool calls of this model: "
            "its template does not support tools, or uses an unknown call format. Choose a model with tool calling, "
            "set chat_template.tool_format if you know the format, or choose a workflow without tools"
        )

    async def _complete(
        self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, params: SamplingParams
    ) -> Step:
        view = snapshot(messages, self._last.messages if self._last is not None else MessageView())
        output = await self.engine.get_model_response(
            view, sampling_params=params, seed=self._turn_seed(), tools=tools, is_validation=self.is_validation
        )
        self._check_prompt_length(len(output.prompt_ids))
        self._check_finish(output.finish_reason)
        segment, reason = 0, None
        tokens = self._tokens
        if tokens is None or self._last is None:
            tokens = TokenLog(output.prompt_ids)
        else:
            segment, known = self._last.segment, len(tokens)
            if starts_with(output.prompt_ids, tokens.view(0, known)):
                tokens.extend(output.prompt_ids[known:])
            else:
                segment, reason = segment + 1, "prefix_mismatch"
                tokens = TokenLog(output.prompt_ids)
        cut, self._tokens = len(tokens), tokens
        tokens.extend(output.completion_ids)
        self._turns += 1
        self._last = Step(
            messages=view,
            response=output.message,
            prompt_ids=tokens.view(0, cut),
            prompt_media=output.prompt_media,
            completion_ids=tokens.view(cut, len(tokens)),
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            weight_version=output.weight_version,
            segment=segment,
            break_reason=reason,
        )
        return self._last

    def _check_prompt_length(self, prompt_tokens: int) -> None:
        if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
            raise Terminated(
                TerminationReason.MAX_PROMPT_TOKENS,
                f"the prompt has {prompt_tokens} tokens, but at most {self.max_prompt_tokens} are allowed",
            )

    def _check_finish(self, finish_reason: FinishReason) -> None:
        if finish_reason is FinishReason.ABORT:
            raise EngineError(f"{_label(self.engine)} aborted the request")

    def _params(self, max_response_tokens: int | None) -> SamplingParams:
        if max_response_tokens is None or max_response_tokens == self.sampling_params.max_response_tokens:
            return self.sampling_params
        return self.sampling_params.model_copy(update={"max_response_tokens": max_response_tokens})

    def _turn_seed(self) -> int:
        return derive_seed(self.seed, self._turns + 1)


def _label(engine: RolloutEngine) -> str:
    return f"engine {getattr(engine, 'name', 'unnamed')!r} ({type(engine).__name__})"


class TITOCompleter(Completer):
    """Token-in/token-out completer: carries the sampled ids of every turn into the next prompt verbatim.

    A workflow writes messages and gets back exact steps. If a conversation cannot be continued token for token, a new
    segment starts, with a reason (see `rllm_core.parser.ParserSession`).

    Args:
        engine: Engine with token-in/token-out support.
        source: Where to send the requests. Defaults to the engine itself.
        on_segment_break: ``"raise"`` raises an error instead of starting a new segment.

    Raises:
        ValueError: If the engine has no parser or does not support token-in/token-out.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        sampling_params: SamplingParams | None = None,
        seed: int = 0,
        is_validation: bool = False,
        max_prompt_tokens: int | None = None,
        source: TokenSource | None = None,
        on_segment_break: Literal["segment", "raise"] = "segment",
        scope: RolloutScope | None = None,
    ) -> None:
        if not engine.supports_token_in_token_out:
            raise ValueError(f"{_label(engine)} does not support token-in/token-out; use Completer or another engine")
        if engine.parser is None:
            raise ValueError(f"{_label(engine)} has no parser, which token-in/token-out requires")
        super().__init__(
            engine,
            sampling_params=sampling_params,
            seed=seed,
            is_validation=is_validation,
            max_prompt_tokens=max_prompt_tokens,
            scope=scope,
        )
        self._source: TokenSource = source or engine
        self.session = engine.parser.session(on_break=on_segment_break)

    def fork(self) -> TITOCompleter:
        """Opens another conversation in the same rollout, with its own session."""
        self._forks += 1
        return TITOCompleter(
            self.engine,
            sampling_params=self.sampling_params,
            seed=derive_seed(self.seed, "fork", self._forks),
            is_validation=self.is_validation,
            max_prompt_tokens=self.max_prompt_tokens,
            source=self._source,
            on_segment_break=self.session.on_break,
            scope=self.scope,
        )

    async def _complete(
        self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, params: SamplingParams
    ) -> Step:
        session = self.session
        turn = session.next_prompt(messages, tools=tools)
        try:
            self._check_prompt_length(len(turn.prompt_ids))
            output = await self._source.get_token_output_from_token_input(
                with_media(turn.prompt_ids, turn.media),
                sampling_params=params,
                seed=self._turn_seed(),
                is_validation=self.is_validation,
            )
            if not isinstance(output, TokenOutput):
                raise TypeError(f"{_label(self.engine)} returned {type(output).__name__}, not a TokenOutput")
            self._check_finish(output.finish_reason)
            if len(output.token_ids) == 0:
                raise EngineError(f"{_label(self.engine)} returned an empty completion")
            session.record_checked(output.token_ids)
        finally:
            session.discard()  # After a failure, the workflow may call again, with the same or other messages.
        self._turns += 1
        # The session has checked the tokens, and TokenOutput its own fields. Media come unchecked from the parser.
        make = Step if turn.media else Step._trusted
        return make(
            step_id=new_id(),
            messages=session.consumed,
            response=session.answer,
            prompt_ids=turn.prompt_ids,
            prompt_media=turn.media,
            completion_ids=session.last_completion_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            weight_version=output.weight_version,
            segment=turn.segment,
            break_reason=None if turn.break_reason is None else turn.break_reason.value,
            control_tokens=turn.control_tokens,
        )

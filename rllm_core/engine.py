"""Rollout engines: tokens in, tokens out; and the completers through which a workflow calls them."""

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
    """A seed in ``[0, 2**63)`` that depends on every part (run, task, rollout, turn), on its type and on the order."""
    named = repr([part if isinstance(part, str) else int(part) for part in parts])
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class EngineError(RuntimeError):
    """The engine failed to answer; the rollout ends as ``engine_error`` and may be tried again."""


class EngineBusy(EngineError):
    """The engine cannot answer now (429, 5xx, a dropped connection): the same request may be sent again.

    Args:
        detail: What it said.
        retry_after_seconds: How long it asks to be left alone, if it does.
    """

    def __init__(self, detail: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class Terminated(Exception):
    """Ends a rollout early with a reason; raised by completers, and by workflows that want to stop."""

    def __init__(self, reason: TerminationReason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


class TokenSource(Protocol):
    """Where a completer gets its tokens: an engine, or the core's merger in front of one."""

    async def get_token_output_from_token_input(
        self, token_input: TokenInput, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """Sample one completion."""
        ...


class RolloutEngine(ABC):
    """Samples from the policy.

    An engine owns no training and no parsing of its own: it is given a `BaseParser`, and everything it returns is
    stamped with the weight version that sampled it. It may be called concurrently from one event loop. Whether a
    call is validation travels with the call, never as engine state.

    Attributes:
        name: The name it is selected by, used in errors.
        parser: The parser whose tokens this engine takes; None if it has none.
        weight_version: Version of the weights it samples from now; the backend moves it in `on_policy_updated`.
        vocabulary_size: Ids in prompts must be smaller; None if the engine does not know.
        computes_logprobs: Whether it has `compute_logprobs`, which a teacher needs.
        too_long_advice: What to do about a prompt that does not fit.
    """

    name: ClassVar[str]
    computes_logprobs: ClassVar[bool] = False
    too_long_advice: ClassVar[str] = "lower rollout.max_response_tokens or shorten the prompt"
    parser: BaseParser | None = None
    weight_version: int = 0
    vocabulary_size: int | None = None

    @classmethod
    def from_config(cls, config: RunConfig, parser: BaseParser) -> RolloutEngine:
        """Build an engine that needs no backend, for ``rllm-core eval WORKFLOW --engine NAME``.

        Engines that the hook ``rollout_engines`` provides override this; a backend builds its own engine itself.

        Args:
            config: The run file. ``config.model.path`` is the model, that of the teacher where this is the teacher's
                engine, and ``config.plugins.get(cls.name)`` the section of the engine, checked by the ``config`` of its
                record; None if it has none, or if another engine makes this one without it.
            parser: Parser of that model.
        """
        raise NotImplementedError(f"{cls.__name__} belongs to a backend and cannot be used without it")

    @property
    def supports_token_in_token_out(self) -> bool:
        """Whether prompts are taken, and completions returned with log-probabilities, as token ids."""
        return False

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        return self.parser.tokenizer if self.parser is not None else None

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus completion the model can take; None if there is no bound."""
        return None

    def check_prompt(self, prompt_ids: TokenIds, new_tokens: int) -> None:
        """Refuse what the model cannot take; for engines to call before they sample or score.

        Args:
            prompt_ids: ``(tokens,)``.
            new_tokens: How many more may be sampled.

        Raises:
            EngineError: If it is empty, holds an id outside the vocabulary, or is too long.
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
        """Sample one completion for a prompt of token ids.

        Args:
            token_input: The prompt; media chunks are refused by engines that take text only.
            sampling_params: How to sample, stop tokens included.
            seed: Same seed, weights and prompt give the same completion where the engine can promise that.
            is_validation: For accounting and priorities; does not change the sampling.

        Raises:
            EngineBusy: If the same request may be sent again later, which the core does.
            EngineError: If no answer could be had.
        """

    async def get_token_outputs_from_token_input(
        self,
        token_input: TokenInput,
        *,
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        is_validation: bool = False,
    ) -> list[TokenOutput]:
        """Sample ``len(seeds)`` completions for one prompt; engines that can share its prefill override this."""
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
        """Score given tokens; engines that can also set ``computes_logprobs``.

        Args:
            tokens: ``(tokens,)`` a prompt and what follows it.
            start: Where the scored tokens begin, at least 1.

        Returns:
            ``(tokens - start,)`` natural-log probabilities at temperature 1 of ``tokens[start:]``, each after all
            tokens before it. NaN for a token whose log-probability the engine does not have, and never another number.

        Raises:
            EngineBusy: If the same call may be made again later, which the core does.
            EngineError: If no answer could be had.
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
        """Answer a conversation: render, sample, assemble. Engines that only speak messages override this."""
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
        """Join a prompt (placeholders where its media stand) and what was sampled for it into one answer."""
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
        """Make ready to sample (colocated engines load their weights and cache)."""

    async def sleep(self) -> None:  # noqa: B027
        """Give memory back until the next `wake_up`."""


class Completer:
    """One conversation with the model, message by message.

    This plain one renders every turn anew through the engine's `get_model_response`. What a workflow normally gets
    is a `TITOCompleter`; both have the same two methods.

    Args:
        engine: The engine to ask.
        sampling_params: Defaults for every turn. Stop tokens come from the engine's parser if none are given.
        seed: The root of this conversation's seeds; turn ``n`` samples with ``derive_seed(seed, n)``, also when it
            is asked again after a failure. An environment that draws at random derives its seeds from it too, as
            ``derive_seed(completer.seed, "environment")``, so that a rollout can be repeated.
        is_validation: Handed on with every call.
        max_prompt_tokens: Longer prompts end the rollout as ``max_prompt_tokens_exceeded``.
        scope: Lifetime of the rollout, shared with its forks; by default one that does not end.
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
        """A second conversation in the same rollout (another agent, a judge, a parallel attempt)."""
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
        """Ask for the next assistant message.

        Returns:
            The step; append ``step.response`` to the conversation before asking again.

        Raises:
            ConfigError: If tools are offered, and the parser cannot read calls of this model.
            EngineError: If the engine failed.
            Terminated: If the prompt is longer than allowed.
            RolloutEnded: If the rollout has ended, also while the model was answering.
        """
        self._check_tools(tools)
        if self._is_busy:
            raise RuntimeError("a completer answers one call at a time: completer.fork() opens another conversation")
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
        """Calls that nobody reads would be answers without a reward, in every rollout and without a word."""
        parser = self.engine.parser
        if not tools or parser is None or parser.supports_tools:
            return
        names = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
        raise ConfigError(
            f"the workflow offers tools ({names}), but parser {parser.name!r} cannot read calls of this model: its "
            "template shows no tools, or writes calls in a format that is not known; choose a model that calls tools, "
            "name the format if you know it (chat_template.tool_format), or choose a workflow without tools"
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
                f"the prompt has {prompt_tokens} tokens, {self.max_prompt_tokens} are allowed",
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
    """Token in, token out: the sampled ids of every turn are carried into the next prompt verbatim.

    A workflow writes messages; the steps it gets back are exact, and a conversation that cannot be continued token
    for token starts a new segment with its reason (see `rllm_core.parser.ParserSession`).

    Args:
        engine: An engine with token-in-token-out.
        source: Where to send the requests, by default the engine itself.
        on_segment_break: ``"raise"`` makes it an error that the conversation cannot be continued token for token.

    Raises:
        ValueError: If the engine has no token-in-token-out or no parser.
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
            raise ValueError(f"{_label(engine)} has no token-in-token-out; use Completer, or another engine")
        if engine.parser is None:
            raise ValueError(f"{_label(engine)} has no parser, which token-in-token-out needs")
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
        """A second conversation in the same rollout, with a session of its own."""
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
            session.discard()  # after a failure the workflow may ask again, with these messages or with others
        self._turns += 1
        # The session has checked the tokens, and the engine's output itself; media are the parser's.
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

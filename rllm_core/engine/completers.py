"""Completers: a workflow's conversations with the model."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rllm_core.costs import SAMPLING
from rllm_core.engine.answers import Answer
from rllm_core.engine.arguments import check_tool_specs, checked_count, checked_stop_texts
from rllm_core.engine.contract import EngineError, PromptTooLong, RolloutEngine, Terminated, described
from rllm_core.engine.stop_texts import message_up_to_stop_text
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, BreakReason, ToolSpec
from rllm_core.scope import RolloutScope, model_called, sampled_of
from rllm_core.seeds import derive_seed
from rllm_core.types import (
    FinishReason,
    MessageLike,
    MessageView,
    SamplingParams,
    Step,
    TerminationReason,
    TokenLog,
    freeze,
    snapshot,
    starts_with,
)


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
        self.scope = scope if scope is not None else RolloutScope()
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        """Sets the state of a new conversation."""
        self.seed = seed
        self._turns = 0
        self._forks = 0
        self._newest: Answer | None = None
        self._tokens = TokenLog()
        self._is_busy = False

    @property
    def _last(self) -> Step | None:
        """Newest step of the conversation."""
        return None if self._newest is None else self._newest.step

    def fork(self, *, after: Step | None = None, key: str | None = None) -> Self:
        """Opens another conversation in the same rollout (another agent, a judge, a parallel attempt).

        Args:
            after: Step to continue from, in any conversation of this rollout. The new conversation starts with the
                messages and the answer of the step, to which the caller appends. The tokens so far are part of its
                prompts; they are sampled, and therefore trained, only once. By default, the conversation starts empty.
            key: Name from which the fork derives its seeds, so that they do not depend on how many forks were opened
                before. Forks of a completer with the same name have the same seeds.

        Raises:
            TypeError: If ``after`` is not a step, or ``key`` is not a text.
            ValueError: If the step was not sampled in this rollout.
        """
        if key is None:
            self._forks += 1
        elif not isinstance(key, str):
            raise TypeError(f"key must be a text, got {key!r:.80}; numbers name the forks without a key")
        return self.forked(self._forks if key is None else key, after)

    def forked(self, name: int | str, after: Step | None = None) -> Self:
        """Opens the fork with this name, or with this number among the forks without a name; see `fork`."""
        answer = None if after is None else self._sampled_as(after)
        fork = copy.copy(self)
        fork._begin(derive_seed(self.seed, "fork", name))
        if answer is not None:
            fork._begin_after(answer)
        return fork

    def _sampled_as(self, step: Step) -> Answer:
        if not isinstance(step, Step):
            raise TypeError(f"{step!r:.80} is not a step; use one that a completer of {self.scope.name} returned")
        answer = self.scope.answers.get(step.step_id)
        if answer is None:
            raise ValueError(
                f"step {step.step_id} was not sampled in {self.scope.name}: use a step that a completer of the same "
                "rollout returned, before run() returns"
            )
        return answer

    def _begin_after(self, answer: Answer) -> None:
        """Sets the state of a conversation that continues after a step."""
        self._newest = answer
        self._tokens = answer.tokens

    async def complete(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        max_response_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> Step:
        """Samples the next assistant message.

        Args:
            messages: The whole conversation so far.
            tools: Tools the model may call.
            max_response_tokens: Maximum length of the completion, including the stop token, instead of the run's.
            stop_texts: Texts that end the completion, which is cut after the token that completes one of them.
            metadata: Metadata of the step.

        Returns:
            The step. Append ``step.response`` to the conversation before the next call.

        Raises:
            ConfigError: If tools are offered, but the parser cannot read tool calls of this model.
            EngineError: If the engine failed.
            Terminated: If the prompt is longer than allowed, or than the model.
            RolloutEnded: If the rollout has ended, or ends during the call.
            ValueError: If ``tools`` is not a list of dictionaries, a stop text is empty, or ``max_response_tokens`` is
                less than 1.
        """
        check_tool_specs(tools)
        self._check_tools(tools)
        self._check_free()
        params = self.sampling_params
        if max_response_tokens is not None:
            limit = checked_count("max_response_tokens", max_response_tokens)
            params = params.model_copy(update={"max_response_tokens": limit})
        if stop_texts:
            params = params.model_copy(update={"stop_texts": checked_stop_texts(stop_texts)})
        with self.scope.call():
            self._is_busy = True
            start = time.perf_counter()
            try:
                step = await self._complete(messages, tools, params, derive_seed(self.seed, self._turns + 1))
            except PromptTooLong as error:
                raise Terminated(TerminationReason.MAX_PROMPT_TOKENS, str(error)) from error
            finally:
                self._is_busy = False
                model_called(start)
        if metadata:
            step.metadata = freeze(metadata)
        answer = Answer(step, sampled_of(step), self._tools_of_prompt(), self._newest)
        self._newest = self.scope.answers[step.step_id] = answer
        return step

    async def complete_many(
        self,
        messages: Sequence[MessageLike],
        count: int,
        *,
        tools: Sequence[ToolSpec] | None = None,
        max_response_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Step]:
        """Samples several alternatives for the next assistant message at once; engines share the prefill if they can.

        The conversation of this completer stays as it is. To continue from an alternative, use
        ``completer.fork(after=step)``. If one call fails, the others are cancelled.

        Args:
            messages: The whole conversation so far.
            count: Number of alternatives.
            tools: See `complete`, as for all other arguments and errors.
            max_response_tokens: See `complete`.
            stop_texts: See `complete`.
            metadata: See `complete`.

        Raises:
            ValueError: If ``count`` is less than 1; see `complete` for other errors.
        """
        count = checked_count("count", count)
        after = self._last
        view = snapshot(messages, after.messages if after is not None else MessageView())
        calls = [
            asyncio.ensure_future(
                self.fork(after=after).complete(
                    view,
                    tools=tools,
                    max_response_tokens=max_response_tokens,
                    stop_texts=stop_texts,
                    metadata=metadata,
                )
            )
            for _ in range(count)
        ]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()

    async def count_prompt_tokens(
        self, messages: Sequence[MessageLike], *, tools: Sequence[ToolSpec] | None = None
    ) -> int:
        """Returns the length in tokens of the prompt that `complete` would sample from.

        Raises:
            EngineError: If the engine has no parser.
            RolloutEnded: If the rollout has ended.
        """
        check_tool_specs(tools)
        self._check_free()
        with self.scope.call():
            return await self._count(messages, tools)

    async def spell(self, step: Step) -> list[bytes]:
        """Returns the bytes of each token of a completion. A letter may take several tokens.

        Args:
            step: Step of this rollout, of any conversation.

        Raises:
            ValueError: If the step was not sampled in this rollout.
            EngineError: If the engine has no parser.
            ConfigError: If the spellings of the tokens cannot be determined.
            RolloutEnded: If the rollout has ended.
        """
        with self.scope.call():
            return await self._spell(self._sampled_as(step).step)

    async def _spell(self, step: Step) -> list[bytes]:
        return self._needed_parser().spell(step.completion_ids)

    async def _count(self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> int:
        return len(self._needed_parser().render(messages, tools=tools))

    def _needed_parser(self) -> BaseParser:
        if self.engine.parser is None:
            raise EngineError(f"{described(self.engine)} has no parser, so the tokens of a text are unknown")
        return self.engine.parser

    def _check_free(self) -> None:
        if self._is_busy:
            raise RuntimeError("a completer handles one call at a time; use completer.fork() for another conversation")

    def _tools_of_prompt(self) -> Sequence[ToolSpec] | None:
        """Returns the tools of the last prompt if a fork needs to know them."""
        return None

    def _check_tools(self, tools: Sequence[ToolSpec] | None) -> None:
        """Rejects tools if the parser cannot read tool calls: rollouts would silently miss their rewards."""
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
        self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, params: SamplingParams, seed: int
    ) -> Step:
        last = self._last
        view = snapshot(messages, last.messages if last is not None else MessageView())
        try:
            output = await self.engine.get_model_response(
                view, sampling_params=params, seed=seed, tools=tools, is_validation=self.is_validation
            )
        except BaseException:
            self.scope.tally.add(SAMPLING, 1, unmetered=1)
            raise
        self.scope.tally.add(SAMPLING, 1, len(output.prompt_ids), len(output.completion_ids))
        self._check_prompt_length(len(output.prompt_ids))
        self._check_finish(output.finish_reason)
        output = message_up_to_stop_text(self.engine, output, params.stop_texts, tools)
        continues = starts_with(output.prompt_ids, self._tokens.ids)
        if not continues:
            self._tokens = TokenLog()
        tokens = self._tokens
        tokens.extend(output.prompt_ids[len(tokens) :])
        cut = len(tokens)
        tokens.extend(output.completion_ids)
        self._turns += 1
        return Step(
            messages=view,
            response=output.message,
            tools=tools or (),
            prompt_ids=tokens.span(0, cut),
            prompt_media=output.prompt_media,
            completion_ids=tokens.span(cut, len(tokens)),
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            weight_version=output.weight_version,
            segment=0 if last is None else last.segment + (not continues),
            break_reason=None if continues else BreakReason.PREFIX_MISMATCH.value,
        )

    def _check_prompt_length(self, prompt_tokens: int) -> None:
        if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
            raise Terminated(
                TerminationReason.MAX_PROMPT_TOKENS,
                f"the prompt has {prompt_tokens} tokens, but at most {self.max_prompt_tokens} are allowed",
            )

    def _check_finish(self, finish_reason: FinishReason) -> None:
        if finish_reason is FinishReason.ABORT:
            raise EngineError(f"{described(self.engine)} aborted the request")

"""The completer that carries sampled token ids from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from rllm_core.costs import SAMPLING
from rllm_core.engine.answers import Answer
from rllm_core.engine.completers import Completer
from rllm_core.engine.contract import EngineError, RolloutEngine, TokenSource, described
from rllm_core.engine.stop_texts import tokens_up_to_stop_text
from rllm_core.parser import ToolSpec
from rllm_core.scope import RolloutScope
from rllm_core.types import FrozenList, MessageLike, SamplingParams, Step, TokenOutput, new_id, with_media

NO_TOOLS = FrozenList()


class TITOCompleter(Completer):
    """Token-in/token-out completer: carries the sampled ids of every turn into the next prompt verbatim.

    A workflow writes messages and gets back exact steps. If a conversation cannot be continued token for token, a new
    segment starts, with a reason (see `rllm_core.parser.ParserSession`).

    Args:
        engine: Engine with token-in/token-out support.
        source: Token source to send requests to. Defaults to the engine itself.
        later_source: Token source for turns after the first. Their prompts contain sampled tokens, so they differ from
            the prompts of all other rollouts, unless sampling is greedy. Defaults to ``source``.
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
        later_source: TokenSource | None = None,
        on_segment_break: Literal["segment", "raise"] = "segment",
        scope: RolloutScope | None = None,
    ) -> None:
        if not engine.supports_token_in_token_out:
            raise ValueError(
                f"{described(engine)} does not support token-in/token-out; use Completer or another engine"
            )
        if engine.parser is None:
            raise ValueError(f"{described(engine)} has no parser, which token-in/token-out requires")
        self._source: TokenSource = source or engine
        self._later_source: TokenSource = later_source or self._source
        self._parser = engine.parser
        self._on_segment_break = on_segment_break
        super().__init__(
            engine,
            sampling_params=sampling_params,
            seed=seed,
            is_validation=is_validation,
            max_prompt_tokens=max_prompt_tokens,
            scope=scope,
        )

    def _begin(self, seed: int) -> None:
        super()._begin(seed)
        self.session = self._parser.session(on_break=self._on_segment_break)

    def forked(self, name: int | str, after: Step | None = None) -> Self:
        """See `Completer.forked`."""
        fork = super().forked(name, after)
        fork.session.call_prefix = f"{fork.seed:016x}_"
        return fork

    def _begin_after(self, answer: Answer) -> None:
        self._newest = answer
        self.session.begin_after(answer.step, answer.tokens, tools=answer.tools, steps=answer.steps)

    def _tools_of_prompt(self) -> Sequence[ToolSpec] | None:
        return self.session.tools

    async def _count(self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> int:
        try:
            return len(self.session.next_prompt(messages, tools=tools).prompt_ids)
        finally:
            self.session.discard()

    async def _complete(
        self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, params: SamplingParams, seed: int
    ) -> Step:
        session = self.session
        turn = session.next_prompt(messages, tools=tools)
        try:
            self._check_prompt_length(len(turn.prompt_ids))
            source = self._later_source if self._turns and params.temperature else self._source
            try:
                output = await source.get_token_output_from_token_input(
                    with_media(turn.prompt_ids, turn.media),
                    sampling_params=params,
                    seed=seed,
                    is_validation=self.is_validation,
                )
                if not isinstance(output, TokenOutput):
                    raise EngineError(f"{described(self.engine)} returned {type(output).__name__}, not TokenOutput")
            except BaseException:
                self.scope.tally.add(SAMPLING, 1, unmetered=1)
                raise
            self.scope.tally.add(SAMPLING, 1, len(turn.prompt_ids), len(output.token_ids))
            self._check_finish(output.finish_reason)
            if len(output.token_ids) == 0:
                raise EngineError(f"{described(self.engine)} returned an empty completion")
            output = tokens_up_to_stop_text(self._parser, output, params.stop_texts)
            session.record_checked(output.token_ids)
        finally:
            session.discard()  # After a failure, the workflow may call again, with the same or other messages.
        self._turns += 1
        # The session has checked the tokens, and TokenOutput its own fields. Media come unchecked from the parser.
        make = Step if turn.media else Step._trusted
        prompt_ids, completion_ids = session.last_spans
        return make(
            step_id=new_id(),
            messages=session.consumed,
            response=session.answer,
            tools=session.tools or NO_TOOLS,
            prompt_ids=prompt_ids,
            prompt_media=turn.media,
            completion_ids=completion_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            weight_version=output.weight_version,
            segment=turn.segment,
            break_reason=None if turn.break_reason is None else turn.break_reason.value,
            control_tokens=turn.control_tokens,
        )

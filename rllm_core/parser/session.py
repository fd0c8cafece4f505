"""Token sequence of one conversation: carries sampled ids forward verbatim, and checks that on every turn.

Within a segment, sampled text is never tokenized again. The parser only supplies the tokens between two completions
(`rllm_core.parser.BaseParser.bridge_to_next_turn`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from rllm_core.parser.appended import Appended, ids_after
from rllm_core.parser.checked_calls import checked_ids, control_tokens, parsed, rendered
from rllm_core.parser.completion import ParsedCompletion
from rllm_core.parser.contract import ParserInterface, ToolSpec
from rllm_core.parser.first_prompts import FirstPrompt, first_prompt
from rllm_core.parser.same_message import same_message
from rllm_core.parser.segments import BreakReason, SegmentBreak, SessionStats, TokenSegment, Turn
from rllm_core.types import (
    FrozenDict,
    FrozenList,
    MessageLike,
    MessageView,
    PlacedMedia,
    SampledMessage,
    Step,
    TokenIds,
    TokenLog,
    freeze,
    message,
    snapshot,
    token_ids,
)

_NO_MESSAGES = MessageView()
_NO_TOKENS = TokenLog()  # never extended: a session's tokens start with a rendered prompt


@dataclass(eq=False, slots=True)
class _Pending:
    """A prompt that waits for its completion, and only then becomes part of the session."""

    turn: Turn
    messages: MessageView
    tools: FrozenList | None
    tokens: TokenLog
    stats_before: SessionStats


class ParserSession:
    """Token sequence of one conversation, used by one asyncio task.

    Guarantees, checked on every turn and for every parser:

    1. Within a segment, ``prompt[k+1]`` starts with ``prompt[k] + completion[k]``, token for token.
    2. Otherwise a new segment starts, with a reason and a counter. Recorded completions are never altered or lost.
    3. A turn may add any messages but the assistant's. The parser decides whether it can bridge to them.
    4. `next_prompt` and `record` alternate. Repeating the same `next_prompt` returns the same turn; `discard` drops a
       prompt that gets no completion.
    5. Results are immutable, and later changes to messages passed in have no effect.
    6. `segments` distinguish sampled tokens from all others: a stop token added by a bridge does not count as sampled.
    7. A session holds no tokenizer, and can be pickled between turns if its parser can.
    8. Tokens sampled after a stop token are kept, and end their segment.
    9. `stats` count bridges, breaks by reason, and control tokens spelled in text.

    Args:
        parser: Parser that renders, bridges and parses.
        tools: Tools the model may call, until `next_prompt` replaces them.
        on_break: ``"raise"`` makes a break an error instead of starting a new segment.

    Attributes:
        call_prefix: Prefix of the ids of tool calls, which distinguishes several conversations.
    """

    call_prefix: str = ""

    def __init__(
        self,
        parser: ParserInterface,
        *,
        tools: Sequence[ToolSpec] | None = None,
        on_break: Literal["segment", "raise"] = "segment",
    ) -> None:
        self.parser = parser
        self.on_break = on_break
        self.stats = SessionStats()
        self._tools = _frozen_tools(tools)
        self._tokens = _NO_TOKENS
        self._segment = 0
        self._spans: list[tuple[int, int]] = []
        self._answer_span = (0, 0)
        self._inherited: Callable[[], Sequence[Step]] | None = None
        self._closed: list[tuple[TokenLog, list[tuple[int, int]]]] = []
        self._media: tuple[PlacedMedia, ...] = ()
        self._consumed = _NO_MESSAGES
        self._answer: FrozenDict | None = None
        self._pending: _Pending | None = None
        self._clean_stop = True
        self._stop_ids = _stop_set(tuple(parser.get_stop_token_ids()))
        self._examples: list[FrozenDict] | None = None
        self._first: FirstPrompt | None = None  # keeps it for other sessions

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._pending is not None:  # unpickled arrays are writable copies, so replace them by a view again
            self._pending.turn = replace(self._pending.turn, prompt_ids=self._pending.tokens.ids)

    @property
    def tools(self) -> Sequence[ToolSpec] | None:
        """Tools the last prompt was rendered with."""
        return self._pending.tools if self._pending is not None else self._tools

    @property
    def consumed(self) -> MessageView:
        """Messages of the last prompt."""
        return self._pending.messages if self._pending is not None else self._consumed

    @property
    def answer(self) -> FrozenDict:
        """Assistant message of the last recorded completion, to be appended to the conversation."""
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._answer

    @property
    def last_prompt_ids(self) -> TokenIds:
        """Prompt of the last recorded completion, as a view of the session's tokens.

        Raises:
            RuntimeError: If nothing has been recorded.
        """
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._tokens.view(0, self._answer_span[0])

    @property
    def last_completion_ids(self) -> TokenIds:
        """Last recorded completion, as a view of the session's tokens."""
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._tokens.view(*self._answer_span)

    @property
    def last_spans(self) -> tuple[Any, Any]:
        """Prompt and completion recorded last, for fields that show `TokenLog.span` as an array."""
        return self._tokens.span(0, self._answer_span[0]), self._tokens.span(*self._answer_span)

    @property
    def segments(self) -> tuple[TokenSegment, ...]:
        """Segments recorded so far. Together, their masks mark every sampled token exactly once."""
        logs = [*self._closed, (self._tokens, self._spans)]
        return tuple(TokenSegment(tokens.view(0, spans[-1][1]), tuple(spans)) for tokens, spans in logs if spans)

    @property
    def recorded(self) -> TokenLog:
        """Tokens up to the last recorded completion, as a separate log that shares memory with this session."""
        return self._tokens.prefix(self._answer_span[1])

    def begin_after(
        self,
        last: Step,
        recorded: TokenLog,
        *,
        tools: Sequence[ToolSpec] | None,
        steps: Callable[[], Sequence[Step]],
    ) -> None:
        """Continues the conversation of another session in this new one. All tokens so far become part of the prompt.

        Args:
            last: Step to continue from.
            recorded: `recorded` of the other session after the step; belongs to this session from now on.
            tools: Tools of the step.
            steps: Function that returns the steps of the other conversation, up to ``last``.
        """
        self._tools = _frozen_tools(tools)
        self._tokens = recorded
        self._answer_span = (len(last.prompt_ids), len(self._tokens))
        self._segment, self._media = last.segment, last.prompt_media
        self._consumed, self._answer = last.messages, message(last.response)
        self._clean_stop = self._ends_at_first_stop(last.completion_ids)
        self._inherited = steps

    def next_prompt(self, messages: Sequence[MessageLike], *, tools: Sequence[ToolSpec] | None = None) -> Turn:
        """Returns the prompt for ``messages``; continues the recorded tokens if ``messages`` continue them exactly.

        Args:
            messages: The whole conversation so far, ending before the assistant's next message.
            tools: New tools of the session. None keeps the current tools; an empty list removes them.

        Raises:
            SegmentBreak: If the tokens cannot be continued and ``on_break="raise"``. The session is unchanged.
            RuntimeError: If the completion of another prompt has been neither recorded nor discarded.
            ValueError: If a new message of a user, the system or a tool has no content.
        """
        consumed = self.consumed
        view = snapshot(messages, consumed)
        new = view[len(consumed) :]
        _check_content(new)
        wanted = self._tools if tools is None else _frozen_tools(tools)
        if self._pending is not None:
            if view == self._pending.messages and (tools is None or wanted == self._pending.tools):
                return self._pending.turn
            raise RuntimeError("record() or discard() the previous prompt before asking for another")
        before, started = self.stats.copy(), time.perf_counter()
        try:
            turn, tokens = self._begin(view, wanted) if self._answer is None else self._continue(view, new, wanted)
        finally:
            self.stats.prompt_seconds += time.perf_counter() - started
        self.stats.control_tokens += turn.control_tokens
        self._pending = _Pending(turn, view, wanted, tokens, before)
        return turn

    def record(self, completion_ids: Sequence[int] | TokenIds) -> ParsedCompletion:
        """Appends a sampled completion verbatim, and parses it.

        Raises:
            RuntimeError: If no prompt is waiting for a completion.
        """
        return self.record_checked(token_ids(completion_ids))

    def record_checked(self, completion: TokenIds) -> ParsedCompletion:
        """`record` for ids that `rllm_core.types.token_ids` has checked."""
        pending = self._pending
        if pending is None:
            raise RuntimeError("call next_prompt() before record()")
        found = parsed(self.parser, completion, prompt_ids=pending.turn.prompt_ids, tools=pending.tools)
        answer = found.to_message(turn=f"{self.call_prefix}{self.stats.turns}")
        self._answer = self._sampled(message(answer), (completion,))
        if pending.turn.segment != self._segment:
            self._closed.append((self._tokens, self._spans))
            self._spans = []
        self._tokens, self._segment, self._media = pending.tokens, pending.turn.segment, pending.turn.media
        self._consumed, self._tools = pending.messages, pending.tools
        prompt_length = len(self._tokens)
        self._tokens.extend_checked(completion)
        self._answer_span = (prompt_length, prompt_length + len(completion))
        self._spans.append(self._answer_span)
        self._clean_stop = self._ends_at_first_stop(completion)
        self._pending = None
        self.stats.turns += 1
        return found

    def discard(self) -> None:
        """Drops the prompt that waits for its completion, if any, and restores the session's previous state."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.tokens is self._tokens:  # the engine may still read the longer prompt
            self._tokens = self.recorded
        self.stats = pending.stats_before

    def _ends_at_first_stop(self, completion: TokenIds) -> bool:
        """Whether nothing but stop tokens follows the first stop token."""
        sampled = completion.tolist()
        if self._stop_ids.isdisjoint(sampled[:-1]):
            return True
        first = next(position for position, token in enumerate(sampled) if token in self._stop_ids)
        return self._stop_ids.issuperset(sampled[first:])

    def _begin(self, view: MessageView, tools: FrozenList | None) -> tuple[Turn, TokenLog]:
        """Returns the first prompt of the conversation, and its log."""
        self._examples = [one for one in view if one["role"] == "assistant"]
        self._first = first = first_prompt(self.parser, view, tools)
        tokens = TokenLog(first.token_ids)
        self.stats.rendered += 1
        return Turn(tokens.ids, self._segment, None, first.media, first.control_tokens), tokens

    def _continue(self, view: MessageView, new: list[FrozenDict], tools: FrozenList | None) -> tuple[Turn, TokenLog]:
        """Returns the prompt of a later turn, and its log: the session's own log if the turn continues it exactly."""
        reason, tail = self._compare(view, new, tools)
        whole: TokenIds | None = None
        if reason is None:
            known = len(self._tokens)
            said = self._tokens.view(0, self._answer_span[0]), self._tokens.view(self._answer_span[0], known)
            self.stats.bridge_attempts += 1
            bridged = self.parser.bridge_to_next_turn(*said, tail, tools=tools)
            ids: Any = self._rendered(view, tools) if bridged is None else bridged
            if type(ids) is not Appended:
                ids = checked_ids(self.parser, "bridge_to_next_turn", ids)
            new_ids = ids_after(*said, ids)
            if new_ids is not None:
                media = self._media + self.parser.place_media(ids, tail, start=known)
                spelt = control_tokens(self.parser, tail)
                self._tokens.extend_checked(new_ids)
                self.stats.bridged += bridged is not None
                self.stats.rendered += bridged is None
                return Turn(self._tokens.ids, self._segment, None, media, spelt), self._tokens
            reason, whole = (BreakReason.BRIDGE_NONE, ids) if bridged is None else (BreakReason.PREFIX_MISMATCH, None)
        if self.on_break == "raise":
            self.stats.count_break(reason)
            raise SegmentBreak(reason)
        opened = self._open(view, tools, reason, tail or view, whole)
        self.stats.count_break(reason)
        return opened

    def _rendered(self, view: MessageView, tools: FrozenList | None) -> TokenIds:
        """Renders the whole conversation. Model output does not become control tokens that the model did not sample.

        Assistant messages before the first completion are examples, whose author is trusted.
        """
        inherited = self._inherited() if self._inherited is not None else ()
        if inherited:
            self._examples = [one for one in inherited[0].messages if one["role"] == "assistant"]
        recorded = ((segment, span) for segment in self.segments for span in segment.completion_spans)
        completions = [step.completion_ids for step in inherited]
        completions += [segment.token_ids[start:stop] for segment, (start, stop) in recorded]
        written = [
            one if one["role"] != "assistant" or one in (self._examples or ()) else self._sampled(one, completions)
            for one in view
        ]
        return rendered(self.parser, MessageView(written), tools=tools)

    def _sampled(self, said: FrozenDict, completions: Sequence[TokenIds]) -> FrozenDict:
        """Marks a message as model output if its text spells control tokens."""
        if type(said) is SampledMessage:
            return said
        written = [text for key, value in said.items() if key != "role" for text in _texts(value)]
        spelt = self.parser.count_control_tokens([{"role": "user", "content": text} for text in written])
        return SampledMessage(said, completions) if spelt else said

    def _compare(
        self, view: MessageView, new: list[FrozenDict], tools: FrozenList | None
    ) -> tuple[BreakReason | None, list[FrozenDict]]:
        """Returns the messages added since the last completion, or the reason why they do not continue it."""
        if not new:
            return BreakReason.SHRUNK, []
        if not view.goes_on_from(self._consumed):
            for one, known in zip(view, self._consumed, strict=False):
                if not same_message(one, known):
                    return BreakReason.HISTORY_EDITED, []
        answer, *tail = new
        if not same_message(answer, self.answer):
            return BreakReason.HISTORY_EDITED, []
        if tools is not self._tools and tools != self._tools:
            return BreakReason.TOOLS_CHANGED, tail
        for added in tail:
            if added["role"] == "assistant":
                return BreakReason.ASSISTANT_INSERTED, tail
        if not tail:
            return BreakReason.HISTORY_EDITED, tail
        if not self._clean_stop:
            return BreakReason.TOKENS_AFTER_STOP, tail
        return None, tail

    def _open(
        self,
        view: MessageView,
        tools: FrozenList | None,
        reason: BreakReason,
        new: Sequence[MessageLike],
        whole: TokenIds | None,
    ) -> tuple[Turn, TokenLog]:
        """Returns the first prompt of a later segment, and its log."""
        tokens = TokenLog(self._rendered(view, tools) if whole is None else whole)
        media = self.parser.place_media(tokens.ids, view)
        spelt = control_tokens(self.parser, new)
        self.stats.rendered += 1
        return Turn(tokens.ids, self._segment + 1, reason, media, spelt), tokens


@lru_cache(maxsize=64)
def _stop_set(stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Returns the same set for all sessions of a parser."""
    return frozenset(stop_token_ids)


def _frozen_tools(tools: Sequence[ToolSpec] | None) -> FrozenList | None:
    return freeze(list(tools)) if tools else None


def _texts(value: Any) -> list[str]:
    """Returns all texts in frozen data."""
    if isinstance(value, str):
        return [value]
    texts: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            texts += (key, item) if type(item) is str else (key, *_texts(item))
    elif isinstance(value, list):
        for item in value:
            texts += _texts(item)
    return texts


def _check_content(messages: Sequence[MessageLike]) -> None:
    """Rejects messages without content, such as ``{"role": "user", "text": "hi"}``: templates render them as empty."""
    for one in messages:
        if "content" not in one and one["role"] in ("user", "system", "tool"):
            raise ValueError(f"a message of role {one['role']!r} needs content; it has {', '.join(map(repr, one))}")

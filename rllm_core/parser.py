"""Parsers: messages to token ids and completions back to messages, stated as equations on token ids.

A parser never sees text between two turns of a rollout: `ParserSession` carries the sampled ids forward verbatim and
asks the parser only for the tokens in between (`BaseParser.bridge_to_next_turn`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rllm_core.types import (
    FrozenDict,
    FrozenList,
    MessageLike,
    MessageView,
    TokenIds,
    TokenLog,
    freeze,
    new_id,
    snapshot,
    starts_with,
    token_ids,
    well_formed,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

ToolSpec = Mapping[str, Any]


class Termination(StrEnum):
    """How a completion ended, as a parser sees it."""

    STOP = "stop"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class ParsedToolCall:
    """One attempt at a tool call; ``status`` is ``"ok"`` or says what is wrong with it."""

    name: str | None
    arguments: Mapping[str, Any] | None
    raw: str
    status: str = "ok"
    call_id: str | None = None


@dataclass(frozen=True)
class ParsedCompletion(Mapping[str, Any]):
    """A completion as a message. Reads like a dictionary: ``parsed["content"]``, ``.get("reasoning")``, ``in``.

    Attributes:
        content: Text outside reasoning and tool calls; never None.
        reasoning: None if there was none; use ``parsed.reasoning or ""`` where text is needed.
        tool_calls: Every attempt, well-formed or not.
        termination: ``stop`` needs a sampled stop token; ``malformed`` a stop inside an unfinished construct.
        reasoning_complete: False if the completion ended inside its reasoning; None without reasoning.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    termination: Termination = Termination.STOP
    reasoning_complete: bool | None = None

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    @property
    def ok_tool_calls(self) -> tuple[ParsedToolCall, ...]:
        """The tool calls that can be executed."""
        return tuple(call for call in self.tool_calls if call.status == "ok")

    def to_message(self, *, turn: int | None = None) -> FrozenDict:
        """The assistant message to append to the conversation (OpenAI shape, arguments as a JSON string).

        Args:
            turn: Number of the turn, for ids of calls that have none: templates may print them, and then two runs with
                one seed need equal ids. Without it the ids are random.
        """
        message: dict[str, Any] = {"role": "assistant", "content": well_formed(self.content)}
        if self.reasoning is not None:
            message["reasoning_content"] = well_formed(self.reasoning)
        if self.ok_tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id or ("call_" + (new_id() if turn is None else f"{turn}_{index}")),
                    "type": "function",
                    "function": {
                        "name": call.name if call.name is None else well_formed(call.name),
                        "arguments": json.dumps(call.arguments, default=dict),
                    },
                }
                for index, call in enumerate(self.ok_tool_calls)
            ]
        return freeze(message)  # type: ignore[no-any-return]


class BaseParser(ABC):
    """Messages to prompt ids, completion ids to a message, for one model family.

    With ``p = render(m)`` the prompt and ``c`` a completion sampled for it, a parser promises

    * ``bridge_to_next_turn(p, c, tail)[: len(p) + len(c)] == p + c`` whenever it is not None;
    * ``parse_completion(c, prompt_ids=p).termination == "stop"`` only if ``c`` holds one of ``get_stop_token_ids()``;
    * none of its methods changes its arguments, and all may be called from several threads.

    It owns its tokenizer: one shared with a padding or truncating collator renders cut prompts without an error.
    """

    name: ClassVar[str]
    supports_tools: bool = False
    supports_bridge: bool = False

    @classmethod
    @abstractmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> BaseParser:
        """Build the parser for a model folder (or hub name), with its own section of the run file."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The parser's private tokenizer."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation, ready for the model to continue."""

    @abstractmethod
    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """Read a completion. Never raises on what a model may sample: malformed output is reported, not thrown."""

    @abstractmethod
    def get_stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn when sampled."""

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[int] | None:
        """``prompt_ids + completion_ids`` verbatim, then the rendering of ``new_messages`` and the next prompt's end.

        Returns:
            The ids, or None if this parser cannot prove that they continue the conversation as the model knows it.
        """
        return None

    def session(
        self, *, tools: Sequence[ToolSpec] | None = None, on_break: Literal["segment", "raise"] = "segment"
    ) -> ParserSession:
        """A session for one conversation of one rollout."""
        return ParserSession(self, tools=tools, on_break=on_break)


class BreakReason(StrEnum):
    """Why a conversation could not go on in the same token sequence."""

    HISTORY_EDITED = "history_edited"
    TOOLS_CHANGED = "tools_changed"
    BRIDGE_NONE = "bridge_none"
    PREFIX_MISMATCH = "prefix_mismatch"
    ASSISTANT_INSERTED = "assistant_inserted"
    TOKENS_AFTER_STOP = "tokens_after_stop"
    SHRUNK = "shrunk"


class SegmentBreak(RuntimeError):
    """A conversation left its token sequence in a session that does not allow it (``on_break="raise"``)."""

    def __init__(self, reason: BreakReason) -> None:
        super().__init__(f"the conversation cannot continue token for token: {reason.value}")
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Turn:
    """The prompt of one turn: ``prompt_ids`` as a read-only view, and the segment it belongs to."""

    prompt_ids: TokenIds
    segment: int
    break_reason: BreakReason | None


_NO_MESSAGES = MessageView()
_NO_TOKENS = TokenLog()  # never extended: a session's tokens begin with a rendered prompt


@dataclass
class SessionStats:
    """What a session counted: how often it bridged, how often it could not, and why."""

    turns: int = 0
    bridged: int = 0
    rendered: int = 0
    breaks: Counter[BreakReason] = field(default_factory=Counter)


@dataclass(eq=False)
class _Pending:
    """A prompt that waits for its completion; nothing of it is part of the session before that."""

    turn: Turn
    messages: MessageView
    tools: FrozenList | None
    tokens: TokenLog
    bridged: bool


class ParserSession:
    """The token sequence of one conversation; confined to one task.

    Guarantees, checked every turn and for every parser:

    1. within a segment, ``prompt[k+1]`` starts with ``prompt[k] + completion[k]``, token for token;
    2. otherwise a new segment begins, with a reason and a counter; recorded completions are never altered or lost;
    3. a turn may add ``[tool*, user?]`` after the assistant's message, nothing else;
    4. `next_prompt` and `record` alternate; the same `next_prompt` twice is the same turn, and `discard` gives up one
       that will not be answered.
    """

    def __init__(
        self,
        parser: BaseParser,
        *,
        tools: Sequence[ToolSpec] | None = None,
        on_break: Literal["segment", "raise"] = "segment",
    ) -> None:
        self.parser = parser
        self.on_break = on_break
        self.stats = SessionStats()
        self._tools = _frozen_tools(tools)
        self._tokens = _NO_TOKENS
        self._prompt_length = 0
        self._completion_length = 0
        self._segment = 0
        self._consumed = _NO_MESSAGES
        self._answer: FrozenDict | None = None
        self._pending: _Pending | None = None
        self._clean_stop = True
        self._stop_ids = frozenset(parser.get_stop_token_ids())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._pending is not None:  # arrays come out of a pickle writable and as copies
            tokens = self._pending.tokens
            self._pending.turn = replace(self._pending.turn, prompt_ids=tokens.view(0, len(tokens)))

    @property
    def tools(self) -> Sequence[ToolSpec] | None:
        """The tools the last prompt was rendered with."""
        return self._pending.tools if self._pending is not None else self._tools

    @property
    def consumed(self) -> MessageView:
        """The messages of the last prompt."""
        return self._pending.messages if self._pending is not None else self._consumed

    @property
    def answer(self) -> FrozenDict:
        """The assistant message of the last recorded completion; append this one to the conversation."""
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._answer

    @property
    def last_completion_ids(self) -> TokenIds:
        """The last recorded completion, as a view of the session's tokens."""
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._tokens.view(self._prompt_length, self._prompt_length + self._completion_length)

    def next_prompt(self, messages: Sequence[MessageLike], *, tools: Sequence[ToolSpec] | None = None) -> Turn:
        """The prompt for ``messages``, continuing the recorded tokens where that is exact.

        Args:
            messages: The whole conversation so far, ending before the assistant's next message.
            tools: Replaces the session's tools; None keeps them, an empty list takes them away.

        Raises:
            SegmentBreak: If the tokens cannot be continued and ``on_break="raise"``; the session stays as it was.
            RuntimeError: If the completion of another prompt has been neither recorded nor discarded.
        """
        view = snapshot(messages, self.consumed)
        wanted = self._tools if tools is None else _frozen_tools(tools)
        if self._pending is not None:
            if view == self._pending.messages and (tools is None or wanted == self._pending.tools):
                return self._pending.turn
            raise RuntimeError("record() or discard() the previous prompt before asking for another")
        self._pending = self._open(view, wanted, None) if self._answer is None else self._continue(view, wanted)
        return self._pending.turn

    def record(self, completion_ids: Sequence[int] | TokenIds) -> ParsedCompletion:
        """Append what was sampled, exactly, and read it.

        Raises:
            RuntimeError: If there is no prompt to answer.
        """
        pending = self._pending
        if pending is None:
            raise RuntimeError("next_prompt() comes before record()")
        completion = token_ids(completion_ids)
        parsed = self.parser.parse_completion(completion, prompt_ids=pending.turn.prompt_ids, tools=pending.tools)
        self._answer = parsed.to_message(turn=self.stats.turns)
        self._tokens, self._segment = pending.tokens, pending.turn.segment
        self._consumed, self._tools = pending.messages, pending.tools
        self._prompt_length, self._completion_length = len(self._tokens), len(completion)
        self._tokens.extend_checked(completion)
        self._clean_stop = self._ends_at_first_stop(completion)
        self._pending = None
        self.stats.turns += 1
        return parsed

    def discard(self) -> None:
        """Give up the prompt that waits for its completion, if there is one: the session is as it was before it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.tokens is self._tokens:  # the engine may still hold the longer prompt, so its buffer is left to it
            self._tokens = TokenLog(self._tokens.view(0, self._prompt_length + self._completion_length))
        if pending.bridged:
            self.stats.bridged -= 1
        else:
            self.stats.rendered -= 1
        if pending.turn.break_reason is not None:
            self.stats.breaks[pending.turn.break_reason] -= 1

    def _ends_at_first_stop(self, completion: TokenIds) -> bool:
        """Whether nothing but stop tokens follows the first stop token."""
        sampled = completion.tolist()
        if self._stop_ids.isdisjoint(sampled[:-1]):
            return True
        first = next(position for position, token in enumerate(sampled) if token in self._stop_ids)
        return self._stop_ids.issuperset(sampled[first:])

    def _continue(self, view: MessageView, tools: FrozenList | None) -> _Pending:
        reason, tail = self._compare(view, tools)
        if reason is not None:
            return self._break(view, tools, reason)
        so_far = self._tokens.view(0, len(self._tokens))
        proposed = self.parser.bridge_to_next_turn(
            so_far[: self._prompt_length], so_far[self._prompt_length :], tail, tools=tools
        )
        bridged = proposed is not None
        ids = token_ids(self.parser.render(view, tools=tools) if proposed is None else proposed)
        if not starts_with(ids, so_far):
            if bridged:
                return self._break(view, tools, BreakReason.PREFIX_MISMATCH)
            return self._break(view, tools, BreakReason.BRIDGE_NONE, ids)
        if bridged:
            self.stats.bridged += 1
        else:
            self.stats.rendered += 1
        self._tokens.extend(ids[len(so_far) :])
        turn = Turn(self._tokens.view(0, len(self._tokens)), self._segment, None)
        return _Pending(turn, view, tools, self._tokens, bridged)

    def _compare(self, view: MessageView, tools: FrozenList | None) -> tuple[BreakReason | None, list[FrozenDict]]:
        """What the conversation added since the last completion, or why it does not follow from it."""
        known = len(self._consumed)
        if len(view) <= known:
            return BreakReason.SHRUNK, []
        for position in range(known):
            if not _same_message(view[position], self._consumed[position]):
                return BreakReason.HISTORY_EDITED, []
        if not _same_message(view[known], self.answer):
            return BreakReason.HISTORY_EDITED, []
        tail = view[known + 1 :]
        if tools != self._tools:
            return BreakReason.TOOLS_CHANGED, tail
        if any(m["role"] == "assistant" for m in tail):
            return BreakReason.ASSISTANT_INSERTED, tail
        roles = [m["role"] for m in tail]
        while roles and roles[0] == "tool":
            roles.pop(0)
        if roles not in ([], ["user"]) or not tail:
            return BreakReason.HISTORY_EDITED, tail
        if not self._clean_stop:
            return BreakReason.TOKENS_AFTER_STOP, tail
        return None, tail

    def _break(
        self, view: MessageView, tools: FrozenList | None, reason: BreakReason, rendered: TokenIds | None = None
    ) -> _Pending:
        if self.on_break == "raise":
            self.stats.breaks[reason] += 1
            raise SegmentBreak(reason)
        pending = self._open(view, tools, reason, rendered)
        self.stats.breaks[reason] += 1
        return pending

    def _open(
        self,
        view: MessageView,
        tools: FrozenList | None,
        reason: BreakReason | None,
        rendered: TokenIds | None = None,
    ) -> _Pending:
        tokens = TokenLog(self.parser.render(view, tools=tools) if rendered is None else rendered)
        self.stats.rendered += 1
        segment = self._segment + (reason is not None)
        return _Pending(Turn(tokens.view(0, len(tokens)), segment, reason), view, tools, tokens, bridged=False)


def _frozen_tools(tools: Sequence[ToolSpec] | None) -> FrozenList | None:
    return freeze(list(tools)) if tools else None


def _same_message(left: FrozenDict, right: FrozenDict) -> bool:
    """Whether two messages mean the same to a template, whatever way a client wrote them."""
    return left is right or left == right or _canonical(left) == _canonical(right)


def _canonical(message: FrozenDict) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value not in (None, "", [])}
    for alias in ("reasoning", "thinking"):
        if alias in plain:
            plain.setdefault("reasoning_content", plain.pop(alias))
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return plain


def _canonical_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # compared as the text it is
    return function.get("name"), arguments

"""Parsers: messages to token ids and completions back to messages, stated as equations on token ids.

A parser never sees text between two turns of a rollout: `ParserSession` carries the sampled ids forward verbatim and
asks the parser only for the tokens in between (`BaseParser.bridge_to_next_turn`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rllm_core.types import (
    FrozenDict,
    MessageLike,
    MessageView,
    TokenIds,
    TokenLog,
    freeze,
    new_id,
    starts_with,
    token_ids,
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

    def to_message(self) -> FrozenDict:
        """The assistant message to append to the conversation (OpenAI shape, arguments as a JSON string)."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.ok_tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id or f"call_{new_id()[:12]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in self.ok_tool_calls
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


@dataclass(frozen=True)
class Turn:
    """The prompt of one turn: ``prompt_ids`` as a read-only view, and the segment it belongs to."""

    prompt_ids: TokenIds
    segment: int
    break_reason: BreakReason | None


@dataclass
class SessionStats:
    """What a session counted: how often it bridged, how often it could not, and why."""

    turns: int = 0
    bridged: int = 0
    rendered: int = 0
    breaks: Counter[BreakReason] = field(default_factory=Counter)


class ParserSession:
    """The token sequence of one conversation; confined to one task.

    Guarantees, checked every turn and for every parser:

    1. within a segment, ``prompt[k+1]`` starts with ``prompt[k] + completion[k]``, token for token;
    2. otherwise a new segment begins, with a reason and a counter; recorded completions are never altered or lost;
    3. a turn may add ``[tool*, user?]`` after the assistant's message, nothing else;
    4. `next_prompt` and `record` alternate; the same `next_prompt` twice is the same turn.
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
        self._tools: Any = freeze(list(tools)) if tools else None
        self._tokens = TokenLog()
        self._prompt_length = 0
        self._segment = 0
        self._consumed = MessageView()
        self._answer: FrozenDict | None = None
        self._pending: Turn | None = None
        self._clean_stop = True
        self._stop_ids = frozenset(parser.get_stop_token_ids())

    @property
    def tools(self) -> Sequence[ToolSpec] | None:
        """The tools the last prompt was rendered with."""
        return self._tools  # type: ignore[no-any-return]

    def next_prompt(self, messages: Sequence[MessageLike], *, tools: Sequence[ToolSpec] | None = None) -> Turn:
        """The prompt for ``messages``, continuing the recorded tokens where that is exact.

        Args:
            messages: The whole conversation so far, ending before the assistant's next message.
            tools: Replaces the session's tools; None keeps them.

        Raises:
            SegmentBreak: If the tokens cannot be continued and ``on_break="raise"``.
            RuntimeError: If the previous prompt's completion has not been recorded.
        """
        view = self._snapshot(messages)
        wanted = freeze(list(tools)) if tools else self._tools
        if self._pending is not None:
            if view == self._consumed and wanted == self._tools:
                return self._pending
            raise RuntimeError("record() the completion of the previous prompt before asking for another")
        if self.stats.turns == 0:
            turn = self._open(view, wanted, None)
        else:
            turn = self._continue(view, wanted)
        self._consumed, self._tools, self._pending = view, wanted, turn
        return turn

    def record(self, completion_ids: Sequence[int] | TokenIds) -> ParsedCompletion:
        """Append what was sampled, exactly, and read it.

        Raises:
            RuntimeError: If there is no prompt to answer.
        """
        if self._pending is None:
            raise RuntimeError("next_prompt() comes before record()")
        completion = token_ids(completion_ids)
        start = len(self._tokens)
        self._tokens.extend(completion)
        self._clean_stop = self._ends_at_first_stop(completion)
        parsed = self.parser.parse_completion(
            self._tokens.view(start, len(self._tokens)), prompt_ids=self._pending.prompt_ids, tools=self._tools
        )
        self._answer = parsed.to_message()
        self._pending = None
        self.stats.turns += 1
        return parsed

    @property
    def answer(self) -> FrozenDict:
        """The assistant message of the last recorded completion; append this one to the conversation."""
        if self._answer is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._answer

    @property
    def last_completion_ids(self) -> TokenIds:
        """The last recorded completion, as a view of the session's tokens."""
        return self._tokens.view(self._prompt_length, len(self._tokens))

    @property
    def consumed(self) -> MessageView:
        """The messages of the last prompt."""
        return self._consumed

    def _snapshot(self, messages: Sequence[MessageLike]) -> MessageView:
        """A view of ``messages`` that shares storage with the last one as far as they agree."""
        if isinstance(messages, MessageView):
            return messages.view()
        known = len(self._consumed)
        if len(messages) >= known and all(messages[i] == self._consumed[i] for i in range(known)):
            return self._consumed.extended(messages[known:])
        return MessageView(messages)

    def _ends_at_first_stop(self, completion: TokenIds) -> bool:
        """Whether nothing but stop tokens follows the first stop token."""
        stopped = False
        for token in completion.tolist():
            if token in self._stop_ids:
                stopped = True
            elif stopped:
                return False
        return True

    def _continue(self, view: MessageView, tools: Any) -> Turn:
        reason, tail = self._compare(view, tools)
        if reason is not None:
            return self._break(view, tools, reason)
        so_far = self._tokens.view(0, len(self._tokens))
        bridged = self.parser.bridge_to_next_turn(
            so_far[: self._prompt_length], so_far[self._prompt_length :], tail, tools=tools
        )
        if bridged is None:
            rendered = self.parser.render(view, tools=tools)
            if not starts_with(rendered, so_far):
                return self._break(view, tools, BreakReason.BRIDGE_NONE, rendered)
            self.stats.rendered += 1
            ids: Sequence[int] = rendered
        elif starts_with(bridged, so_far):
            self.stats.bridged += 1
            ids = bridged
        else:
            return self._break(view, tools, BreakReason.PREFIX_MISMATCH)
        self._tokens.extend(token_ids(ids[len(so_far) :]))
        self._prompt_length = len(self._tokens)
        return Turn(self._tokens.view(0, self._prompt_length), self._segment, None)

    def _compare(self, view: MessageView, tools: Any) -> tuple[BreakReason | None, list[FrozenDict]]:
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

    def _break(self, view: MessageView, tools: Any, reason: BreakReason, rendered: list[int] | None = None) -> Turn:
        self.stats.breaks[reason] += 1
        if self.on_break == "raise":
            raise SegmentBreak(reason)
        self._segment += 1
        return self._open(view, tools, reason, rendered)

    def _open(
        self, view: MessageView, tools: Any, reason: BreakReason | None, rendered: list[int] | None = None
    ) -> Turn:
        if rendered is None:
            rendered = self.parser.render(view, tools=tools)
        self.stats.rendered += 1
        self._tokens = TokenLog(token_ids(rendered))
        self._prompt_length = len(self._tokens)
        return Turn(self._tokens.view(0, self._prompt_length), self._segment, reason)


def _same_message(left: FrozenDict, right: FrozenDict) -> bool:
    """Whether two messages mean the same to a template, whatever way a client wrote them."""
    return left is right or left == right or _canonical(left) == _canonical(right)


def _canonical(message: FrozenDict) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value not in (None, "", [])}
    for alias in ("reasoning", "thinking"):
        if alias in plain:
            plain.setdefault("reasoning_content", plain.pop(alias))
    if "tool_calls" in plain:
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return plain


def _canonical_call(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # compared as the text it is
    return function.get("name"), arguments

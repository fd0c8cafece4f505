"""Contract of a parser: messages to token ids and completions back to messages, stated as equations on token ids."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rllm_core.types import FrozenDict, MessageLike, PlacedMedia, TokenIds, freeze, new_id, well_formed

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rllm_core.parser.session import ParserSession
    from rllm_core.parser.supervised import MaskedTokens
    from rllm_core.parser.vocabulary import Vocabulary

ToolSpec = Mapping[str, Any]
MaskMethod = Literal["cumulative", "stepwise", "hf_template"]


class Termination(StrEnum):
    """How a completion ended, according to the parser."""

    STOP = "stop"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class ParsedToolCall:
    """One attempt at a tool call. ``status`` is ``"ok"`` or describes the problem."""

    name: str | None
    arguments: Mapping[str, Any] | None
    raw: str
    status: str = "ok"
    call_id: str | None = None


@dataclass(frozen=True)
class ParsedCompletion(Mapping[str, Any]):
    """A completion as a message. Can be read as a dictionary: ``parsed["content"]``, ``.get("reasoning")``, ``in``.

    Attributes:
        content: Text outside reasoning and tool calls; never None.
        reasoning: Reasoning, or None. Use ``parsed.reasoning or ""`` where text is needed.
        tool_calls: All attempted tool calls, well-formed or not.
        termination: ``stop`` if a stop token was sampled; ``malformed`` if it was sampled inside an unfinished
            construct; otherwise ``truncated``.
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
        """Tool calls that can be executed."""
        return tuple(call for call in self.tool_calls if call.status == "ok")

    def to_message(self, *, turn: int | None = None) -> FrozenDict:
        """Returns the assistant message to append to the conversation (OpenAI format, arguments as a JSON string).

        Args:
            turn: Number of the turn, used to build ids for tool calls without one. Templates may print these ids, so
                runs with the same seed need equal ids. Without it, the ids are random.
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
                        "arguments": well_formed(json.dumps(call.arguments, default=dict, ensure_ascii=False)),
                    },
                }
                for index, call in enumerate(self.ok_tool_calls)
            ]
        return freeze(message)  # type: ignore[no-any-return]


class BaseParser(ABC):
    """Converts messages to prompt ids, and completion ids to a message, for one model family.

    With the prompt ``p = render(m)`` and a completion ``c`` sampled for it, a parser guarantees:

    * ``bridge_to_next_turn(p, c, tail)[: len(p) + len(c)] == p + c`` whenever the result is not None;
    * ``parse_completion(c, prompt_ids=p).termination == "stop"`` only if ``c`` has one of ``get_stop_token_ids()``;
    * no method changes its arguments, and all methods may be called from several threads.

    A parser owns its tokenizer. If it shared one with a padding or truncating collator, prompts would be cut silently.
    """

    name: ClassVar[str]
    supports_tools: bool = False
    supports_bridge: bool = False
    supports_media: bool = False

    @classmethod
    @abstractmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> BaseParser:
        """Builds the parser for a model folder (or Hugging Face ID), with its section of the run file."""

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
        """Returns the ids of a whole conversation, ready for the model to continue."""

    @abstractmethod
    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """Parses a completion. Never raises on model output: malformed output is reported in the result."""

    @abstractmethod
    def get_stop_token_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an assistant turn when sampled."""

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[int] | TokenIds | None:
        """Bridges two turns: ``prompt_ids + completion_ids`` verbatim, then the rendering of ``new_messages``.

        The result ends like any prompt, ready for the next completion.

        Returns:
            The ids (in long conversations, an array is cheaper than a list), or None if this parser cannot prove that
            they exactly continue the conversation so far.
        """
        return None

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """Counts how often the text of users and tools in ``messages`` spells a control token of the model.

        Such text must not become that token: otherwise, a tool result could end its turn and speak as the system. A
        parser writes it with ordinary tokens unless its section of the run file says otherwise. It is counted either
        way.
        """
        return 0

    def place_media(
        self, prompt_ids: Sequence[int] | TokenIds, messages: Sequence[MessageLike], *, start: int = 0
    ) -> tuple[PlacedMedia, ...]:
        """Returns the positions of the media of ``messages`` in ``prompt_ids[start:]``; empty for text."""
        return ()

    def vocabulary(self) -> Vocabulary:
        """Returns the spelling of every token, to compare two tokenizers and to align them by bytes.

        Raises:
            ConfigError: If the spellings cannot be determined.
        """
        from rllm_core.parser.vocabulary import hugging_face_vocabulary

        return hugging_face_vocabulary(self.tokenizer)

    def session(
        self, *, tools: Sequence[ToolSpec] | None = None, on_break: Literal["segment", "raise"] = "segment"
    ) -> ParserSession:
        """Opens a session for one conversation of one rollout."""
        from rllm_core.parser.session import ParserSession

        return ParserSession(self, tools=tools, on_break=on_break)

    def tokenize_and_mask(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        method: MaskMethod = "cumulative",
    ) -> list[MaskedTokens]:
        """Returns supervised data: the tokens of a conversation, and which of them are targets.

        An assistant message with ``"weight": 0`` is context only, as in OpenAI's fine-tuning format.

        Args:
            messages: The whole conversation.
            tools: Tools the model may call.
            method: ``cumulative``: the rows of a session in which the model samples these assistant messages; one row,
                unless the conversation cannot continue in the same token sequence. ``stepwise``: one row per assistant
                message, preceded by the template's rendering of everything before it. ``hf_template``: one row, masked
                by the tokenizer's own template (``{% generation %}``), if the parser supports it.

        Raises:
            ConfigError: If there is nothing to learn, or a message's tokens cannot be separated; names its index.
        """
        from rllm_core.parser.supervised import tokenize_and_mask

        return tokenize_and_mask(self, messages, tools=tools, method=method)

    def describe(self) -> Mapping[str, Any]:
        """Properties that ``rllm-core parser check`` prints besides its measurements: family, tool format, ...

        Names and values are for people. Values are JSON data.
        """
        return {}

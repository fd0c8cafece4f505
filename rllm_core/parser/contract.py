"""What a parser is: messages to token ids and completions back to messages, stated as equations on token ids."""

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
                        "arguments": well_formed(json.dumps(call.arguments, default=dict, ensure_ascii=False)),
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
    supports_media: bool = False

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
    ) -> list[int] | TokenIds | None:
        """``prompt_ids + completion_ids`` verbatim, then the rendering of ``new_messages`` and the next prompt's end.

        Returns:
            The ids (an array costs less than a list in a long conversation), or None if this parser cannot prove that
            they continue the conversation as the model knows it.
        """
        return None

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """How often the text of users and tools in ``messages`` spells a control token of the model.

        Such text must not become that token: a tool's result could end its turn and speak as the system. A parser
        writes it with ordinary tokens, unless its section of the run file says otherwise; it is counted either way.
        """
        return 0

    def place_media(
        self, prompt_ids: Sequence[int] | TokenIds, messages: Sequence[MessageLike], *, start: int = 0
    ) -> tuple[PlacedMedia, ...]:
        """Where the media of ``messages`` stand in ``prompt_ids[start:]``, which renders them; none for text."""
        return ()

    def vocabulary(self) -> Vocabulary:
        """What each of the tokenizer's tokens spells, to compare it with another's and to align the two by bytes.

        Raises:
            ConfigError: If that cannot be told.
        """
        from rllm_core.parser.vocabulary import hugging_face_vocabulary

        return hugging_face_vocabulary(self.tokenizer)

    def session(
        self, *, tools: Sequence[ToolSpec] | None = None, on_break: Literal["segment", "raise"] = "segment"
    ) -> ParserSession:
        """A session for one conversation of one rollout."""
        from rllm_core.parser.session import ParserSession

        return ParserSession(self, tools=tools, on_break=on_break)

    def tokenize_and_mask(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        method: MaskMethod = "cumulative",
    ) -> list[MaskedTokens]:
        """Supervised data: the tokens of a conversation, and which of them the model shall learn to say.

        An assistant message with ``"weight": 0`` is shown and not learnt, as in OpenAI's fine-tuning format.

        Args:
            messages: The whole conversation.
            tools: What the model may call.
            method: ``cumulative``: the rows that a session leaves when the model samples these assistant messages: one,
                unless the conversation cannot go on in the same token sequence. ``stepwise``: one row per assistant
                message, after everything before it as the template renders that. ``hf_template``: one row, masked
                by the tokenizer's own template (``{% generation %}``), where the parser has one.

        Raises:
            ConfigError: If there is nothing to learn, or a message's own tokens cannot be told; names its index.
        """
        from rllm_core.parser.supervised import tokenize_and_mask

        return tokenize_and_mask(self, messages, tools=tools, method=method)

    def describe(self) -> Mapping[str, Any]:
        """What ``rllm-core parser check`` tells about this parser besides what it measures: family, tool format, ...

        Names and values are for people; values are JSON data.
        """
        return {}

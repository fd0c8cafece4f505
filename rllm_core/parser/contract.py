"""Contract of a parser: messages to token ids and completions back to messages, stated as equations on token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from rllm_core.parser.appended import Appended
from rllm_core.parser.completion import ParsedCompletion
from rllm_core.parser.vocabulary import Vocabulary, hugging_face_vocabulary
from rllm_core.types import MessageLike, PlacedMedia, TokenIds

ToolSpec = Mapping[str, Any]
MaskMethod = Literal["cumulative", "stepwise", "hf_template"]


class ParserInterface(ABC):
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
        """Returns the ids of a whole conversation, ready for the model to continue.

        They depend on the arguments alone: conversations that begin with the same messages share one result.
        """

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
    ) -> Appended | list[int] | TokenIds | None:
        """Bridges two turns: ``prompt_ids + completion_ids`` verbatim, then the rendering of ``new_messages``.

        The result ends like any prompt, ready for the next completion.

        Args:
            prompt_ids: ``(prompt_tokens,)`` prompt of the last turn.
            completion_ids: ``(completion_tokens,)`` its completion, with or without a stop token.
            new_messages: Messages that follow: at least one, of any role but the assistant's. Usually tool results, a
                message of the user, or both in this order; return None for messages that this parser cannot bridge to.
            tools: Tools the model may call.

        Returns:
            The ids, or None if this parser cannot prove that they exactly continue the conversation so far. Return
            ``Appended(prompt_ids, completion_ids, new_ids)`` if nothing but tokens at the end is new: its cost does not
            grow with the conversation.
        """
        return None

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """Counts how often the text of users and tools in ``messages`` spells a control token of the model.

        Such text must not become that token: otherwise, a tool result could end its turn and speak as the system. A
        parser writes the text with ordinary tokens unless its section of the run file says otherwise. The text is
        counted either way.
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
        return hugging_face_vocabulary(self.tokenizer)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of tokens, control tokens as their names. Bytes that are not valid text become U+FFFD.

        Raises:
            ConfigError: If the spellings of the tokens cannot be determined.
        """
        return b"".join(self.spell(ids)).decode(errors="replace")

    def spell(self, ids: Sequence[int] | TokenIds) -> list[bytes]:
        """Returns the bytes of each token, control tokens as their names; empty for a token that spells nothing.

        Raises:
            ConfigError: If the spellings of the tokens cannot be determined.
        """
        spellings = self._spellings
        known = len(spellings)
        return [spellings[token] if token < known else b"" for token in map(int, ids)]

    @cached_property
    def _spellings(self) -> list[bytes]:
        """Returns the bytes of every token."""
        vocabulary = self.vocabulary()
        spellings = [one or b"" for one in vocabulary.spellings]
        for name, token in vocabulary.control_ids.items():
            spellings.extend([b""] * (token + 1 - len(spellings)))
            spellings[token] = name.encode()
        return spellings

    def describe(self) -> Mapping[str, Any]:
        """Properties that ``rllm-core parser check`` prints besides its measurements: family, tool format, ...

        Names and values are for people. Values are JSON data.
        """
        return {}

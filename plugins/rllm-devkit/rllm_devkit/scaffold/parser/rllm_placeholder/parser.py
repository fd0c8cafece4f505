"""``placeholder``: converts messages to ChatML token ids, and completions back to messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from rllm_core.errors import ConfigError
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, Termination, ToolSpec
from rllm_core.types import MessageLike, TokenIds
from transformers import AutoTokenizer

START, END = "<|im_start|>", "<|im_end|>"


class PlaceholderParser(BaseParser):
    r"""Renders each message as ``<|im_start|>role\\n content <|im_end|>\\n``, like Qwen models; no tools or images.

    Args:
        tokenizer: Fast tokenizer of transformers, not shared with other code.

    Raises:
        ConfigError: If the tokenizer lacks these tokens.
    """

    name: ClassVar[str] = "placeholder"
    supports_bridge = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.get_added_vocab()
        if START not in known or END not in known:
            raise ConfigError(f"the tokenizer has no {START} and {END}; use a model that was trained with ChatML")
        self._start, self._end = int(known[START]), int(known[END])
        self._newline = self._encoded("\n")

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> PlaceholderParser:
        """Reads the tokenizer of a model folder or Hugging Face model ID."""
        if not str(path):
            raise ConfigError(f"parser {cls.name!r} needs model.path: a model folder or Hugging Face model ID")
        try:
            return cls(AutoTokenizer.from_pretrained(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the tokenizer of model {str(path)!r}: {error}") from error

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self._tokenizer

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders a conversation. The prompt for an answer has the same ids whether or not the answer follows."""
        ids: list[int] = []
        for message in messages:
            header = self._encoded(f"{message['role']}\n")
            ids += [self._start, *header, *self._encoded(_text(message)), self._end, *self._newline]
        if add_generation_prompt:
            ids += [self._start, *self._encoded("assistant\n")]
        return ids

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """Returns the text before the first stop token; without one, the completion was truncated."""
        ids = [int(token) for token in completion_ids]
        is_complete = self._end in ids
        body = ids[: ids.index(self._end)] if is_complete else ids
        text = self._tokenizer.decode(body, skip_special_tokens=False)
        return ParsedCompletion(text, termination=Termination.STOP if is_complete else Termination.TRUNCATED)

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """``<|im_end|>``."""
        return (self._end,)

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Appended:
        """Appends new messages to the sampled tokens, which stay unchanged; closes a truncated answer first."""
        closing = [] if self._end in completion_ids else [self._end]
        return Appended(prompt_ids, completion_ids, [*closing, *self._newline, *self.render(new_messages)])

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """Counts control tokens spelled out by users and tools; they are still encoded as text."""
        texts = [_text(message) for message in messages if message["role"] in ("user", "tool")]
        return sum(text.count(token) for text in texts for token in self._tokenizer.all_special_tokens)

    def _encoded(self, text: str) -> list[int]:
        """Encodes text as plain text, even if it spells a control token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def _text(message: MessageLike) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"content of a {message['role']} is a {type(content).__name__}; this parser takes text only")
    return content or ""

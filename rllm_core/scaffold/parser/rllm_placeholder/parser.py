"""``placeholder``: ChatML. Messages to token ids, and completions back to messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, ParsedCompletion, Termination, ToolSpec
from rllm_core.types import MessageLike, TokenIds
from transformers import AutoTokenizer

START, END = "<|im_start|>", "<|im_end|>"


class PlaceholderParser(BaseParser):
    r"""``<|im_start|>role\\n content <|im_end|>\\n`` per message, as Qwen's models have it; no tools, no images.

    Args:
        tokenizer: A fast tokenizer of transformers that nobody else holds.

    Raises:
        ConfigError: If it has no such tokens.
    """

    name: ClassVar[str] = "placeholder"
    supports_bridge = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.get_added_vocab()
        if START not in known or END not in known:
            raise ConfigError(f"the tokenizer has no {START} and {END}, so the model does not speak ChatML")
        self._start, self._end = int(known[START]), int(known[END])
        self._newline = self._encoded("\n")

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> PlaceholderParser:
        """Read the tokenizer of a model folder or hub name."""
        if not str(path):
            raise ConfigError(f"model.path is not set; parser {cls.name!r} needs a model folder or hub name")
        try:
            return cls(AutoTokenizer.from_pretrained(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {str(path)!r} has no tokenizer that can be loaded: {error}") from error

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a conversation; what is in front of an answer is the same whether the answer follows or not."""
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
        """Everything before the first stop token is text; without one, the completion was cut off."""
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
    ) -> list[int]:
        """Go on from the sampled tokens, which are never made from their text again; a cut answer is closed."""
        completion = [int(token) for token in completion_ids]
        closing = [] if self._end in completion else [self._end]
        return [*map(int, prompt_ids), *completion, *closing, *self._newline, *self.render(new_messages)]

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """How often users and tools spell a control token, which stays text all the same."""
        texts = [_text(message) for message in messages if message["role"] in ("user", "tool")]
        return sum(text.count(token) for text in texts for token in self._tokenizer.all_special_tokens)

    def _encoded(self, text: str) -> list[int]:
        """Text as text, even where it spells a control token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def _text(message: MessageLike) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"content of a {message['role']} is a {type(content).__name__}; this parser takes text only")
    return content or ""

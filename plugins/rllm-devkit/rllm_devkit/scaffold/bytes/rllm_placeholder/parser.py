"""Parser ``placeholder``: UTF-8 bytes as tokens. Delete it for a model with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, Termination, ToolSpec, Vocabulary
from rllm_core.types import MessageLike, TokenIds

BYTES, START, END = 256, 256, 257


class PlaceholderParser(BaseParser):
    r"""Renders each message as ``<start>role\\n content <end>``, with a token per byte; no tools or images."""

    name: ClassVar[str] = "placeholder"
    supports_bridge = True

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> PlaceholderParser:
        """Ignores the model; there is nothing to read."""
        return cls()

    @property
    def tokenizer(self) -> Any:
        """None: bytes need no tokenizer."""
        return None

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
            content = message.get("content") or ""
            text = content if isinstance(content, str) else json.dumps(content)
            ids += [START, *f"{message['role']}\n{text}".encode(), END]
        if add_generation_prompt:
            ids += [START, *b"assistant\n"]
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
        is_complete = END in ids
        body = ids[: ids.index(END)] if is_complete else ids
        text = bytes(token for token in body if token < BYTES).decode(errors="replace")
        return ParsedCompletion(text, termination=Termination.STOP if is_complete else Termination.TRUNCATED)

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """``<end>``."""
        return (END,)

    def vocabulary(self) -> Vocabulary:
        """256 bytes and the two control tokens."""
        spellings = [*(bytes([byte]) for byte in range(BYTES)), None, None]
        return Vocabulary(spellings, {"<start>": START, "<end>": END}, lambda text: list(text.encode()))

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> Appended:
        """Appends new messages to the sampled tokens, which stay unchanged; closes a truncated completion first."""
        end = [] if END in completion_ids else [END]
        return Appended(prompt_ids, completion_ids, [*end, *self.render(new_messages, tools=tools)])

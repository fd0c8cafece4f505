"""Base class of parsers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rllm_core.parser.contract import MaskMethod, ParserInterface, ToolSpec
from rllm_core.parser.session import ParserSession
from rllm_core.parser.supervised import MaskedTokens, tokenize_and_mask
from rllm_core.types import MessageLike

if TYPE_CHECKING:
    from pydantic import BaseModel


class BaseParser(ParserInterface):
    """Base class of parsers: a contract to implement for one model family, and the methods that the core adds to it."""

    @classmethod
    @abstractmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> BaseParser:
        """Builds the parser for a model folder (or Hugging Face ID), with its section of the run file."""

    def session(
        self, *, tools: Sequence[ToolSpec] | None = None, on_break: Literal["segment", "raise"] = "segment"
    ) -> ParserSession:
        """Opens a session for one conversation of one rollout."""
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
            ConfigError: If there is nothing to learn, or a message's tokens cannot be separated; names the index.
        """
        return tokenize_and_mask(self, messages, tools=tools, method=method)

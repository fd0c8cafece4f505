"""``chat_template``: renders with the model's own template, and bridges turns with the suffix method."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.parser import MaskedTokens, MaskMethod, ToolSpec
from rllm_core.types import MediaChunk, MessageLike, PlacedMedia, TokenIds, token_ids
from rllm_renderers.encoding import Encoder
from rllm_renderers.formats import FORMATS, tool_format
from rllm_renderers.loading import load_tokenizer, stop_token_ids
from rllm_renderers.media import ImageInputs, MediaProcessor, has_media, images_of, load_media
from rllm_renderers.supervised import masked_by_template
from rllm_renderers.template import ChatTemplate
from rllm_renderers.template_check import complaints
from rllm_renderers.text_parser import TextParser

logger = logging.getLogger(__name__)

_DECIDED_BY_THE_PARSER = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)


class ChatTemplateConfig(Section):
    """``[chat_template]``: settings for the model's chat template."""

    trust_remote_code: Annotated[
        bool, Field(description="Run tokenizer code shipped with the model. Enable only for models you trust.")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="Template variables, for example {enable_thinking = false}.")
    ] = Field(default_factory=dict)
    bridge: Annotated[
        bool,
        Field(
            description="Carry a conversation's sampled tokens, reasoning included, into its next prompt where this is "
            "proven exact. If false, every turn is rendered again, and the template decides which reasoning to drop."
        ),
    ] = True

    tool_format: Annotated[
        Literal["auto", "qwen_xml", "glm", "hermes", "deepseek", "mistral", "harmony", "llama"],
        Field(
            description="Format of the model's tool calls. auto detects it from the template; if that fails, calls "
            "are not parsed."
        ),
    ] = "auto"

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_DECIDED_BY_THE_PARSER.intersection(value)):
            raise ValueError(f"{taken[0]!r} is set by the parser")
        return value


class ChatTemplateParser(TextParser):
    """Renders with the tokenizer's own chat template; see `TextParser`.

    Args:
        tokenizer: A tokenizer with a chat template, owned by the parser from now on.
        stop_token_ids: Ids that end an assistant turn.
        config: Settings from the run file.
        media: Image processor of the model, or the reason why messages cannot contain images.

    Raises:
        ConfigError: If the template accepts no conversation, or omits user messages.
    """

    name: ClassVar[str] = "chat_template"
    template: ChatTemplate

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        config: ChatTemplateConfig | None = None,
        media: MediaProcessor | str = "the model takes text only",
    ) -> None:
        self.config = config or ChatTemplateConfig()
        template = ChatTemplate(tokenizer, Encoder(tokenizer), stop_token_ids, self.config.chat_template_kwargs, media)
        name = self.config.tool_format
        super().__init__(
            template, tool_format(template) if name == "auto" else FORMATS[name], bridge=self.config.bridge
        )

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> ChatTemplateParser:
        """Loads a tokenizer for this parser alone, from a model folder or Hugging Face model ID.

        Raises:
            ConfigError: If there is no tokenizer, no chat template, or no token that ends a turn.
        """
        section = ChatTemplateConfig.model_validate({} if config is None else config)
        tokenizer = load_tokenizer(str(path), trust_remote_code=section.trust_remote_code, parser=cls.name)
        media = load_media(str(path), trust_remote_code=section.trust_remote_code)
        if not tokenizer.chat_template and isinstance(media, MediaProcessor):
            tokenizer.chat_template = media.chat_template
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of model {str(path)!r} has no chat template")
        parser = cls(tokenizer, stop_token_ids(str(path), tokenizer), section, media)
        for complaint in complaints(parser.template):
            logger.warning("model %s: %s", path, complaint)
        return parser

    def place_media(
        self, prompt_ids: Sequence[int] | TokenIds, messages: Sequence[MessageLike], *, start: int = 0
    ) -> tuple[PlacedMedia, ...]:
        """See `BaseParser.place_media`."""
        resolved = self.template.resolved(messages)
        if self.template.media is None or not (images := images_of(resolved)):
            return ()
        return self.template.media.place(token_ids(prompt_ids), images, start)

    def media_inputs(self, chunk: MediaChunk) -> ImageInputs:
        """Returns the inputs of the model's vision part for an image, see `MediaProcessor.inputs`."""
        if self.template.media is None:
            raise ValueError("this parser does not support images")
        return self.template.media.inputs(chunk)

    def media_probe(self) -> tuple[TokenIds, tuple[PlacedMedia, ...]]:
        """Returns a short prompt with one image, for backends that check how they read images."""
        if self.template.media is None:
            raise ValueError("this parser does not support images")
        part = self.template.media.probe_part()
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
        prompt_ids = token_ids(self.render(messages))
        return prompt_ids, self.place_media(prompt_ids, messages)

    def tokenize_and_mask(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        method: MaskMethod = "cumulative",
    ) -> list[MaskedTokens]:
        """See `BaseParser.tokenize_and_mask`; ``hf_template`` is transformers' own mask."""
        if has_media(messages):
            raise ConfigError(
                "tokenize_and_mask: a conversation contains an image, but its rows consist of tokens only"
            )
        if method == "hf_template":
            return [masked_by_template(self.template, messages, tools)]
        return super().tokenize_and_mask(messages, tools=tools, method=method)

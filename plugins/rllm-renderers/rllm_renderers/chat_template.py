"""``chat_template``: renders with the model folder's own template, and bridges turns by the suffix method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, field_validator

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, MaskedTokens, MaskMethod, ParsedCompletion, ToolSpec
from rllm_core.types import MediaChunk, MessageLike, PlacedMedia, TokenIds, token_ids
from rllm_renderers.cache import BoundedCache
from rllm_renderers.encoding import ControlTokens
from rllm_renderers.formats import FORMATS, NoCalls, Schemas, schemas_of
from rllm_renderers.loading import load_tokenizer, stop_token_ids
from rllm_renderers.media import ImageInputs, MediaProcessor, has_media, images_of, load_media
from rllm_renderers.self_check import Tail, bridged_tails, names_calls, shows_tools, tool_format
from rllm_renderers.supervised import masked_by_template
from rllm_renderers.template import ChatTemplate, Suffix

CACHE_CHARACTERS = 16_000_000
GENERATION_PROMPT_TOKENS = 32

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


_write_key = json.JSONEncoder(default=dict).encode


class ChatTemplateConfig(Section):
    """``[chat_template]``: how the model's template is used."""

    trust_remote_code: Annotated[
        bool, Field(description="Run tokenizer code that comes with the model; only for models you trust.")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="Variables of the template, e.g. {enable_thinking = false}.")
    ] = Field(default_factory=dict)
    bridge: Annotated[
        bool,
        Field(
            description="Carry a conversation's sampled tokens, reasoning included, into its next prompt where that is "
            "proven exact; false renders every turn anew, with the template's own rules for dropping reasoning."
        ),
    ] = True

    control_tokens: Annotated[
        ControlTokens,
        Field(
            description='What becomes of text of users and tools that spells a control token: "neutralise" writes it '
            'with ordinary tokens, "raw" lets it be the control token.'
        ),
    ] = "neutralise"

    tool_format: Annotated[
        Literal["auto", "qwen_xml", "glm", "hermes", "deepseek", "mistral", "harmony", "llama"],
        Field(
            description='How the model writes tool calls; "auto" reads it off what the template writes, and where that '
            "tells nothing, calls are not read."
        ),
    ] = "auto"

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_DECIDED_BY_THE_PARSER.intersection(value)):
            raise ValueError(f"{taken[0]!r} is decided by the parser")
        return value


class ChatTemplateParser(BaseParser):
    """Renders with the tokenizer's own chat template; reads reasoning, and tool calls in the format it writes.

    ``supports_tools`` means that the template shows tools to the model and that the format of calls is known; where
    ``tool_format`` is `NoCalls`, what may be a call is content.

    Bridging, the suffix method: a short made-up conversation whose assistant says a sentinel is rendered together with
    the new messages. What follows the first stop token after the sentinel is what every conversation goes on with; it
    is appended to the prompt and the completion as they are. So the prefix holds by construction, and reasoning stays
    in the prompt even where the template would drop it from a full rendering (``bridge = false`` turns this off).

    Bridging is on only for the kinds of tail in ``bridged_tails``, for which a check at construction found it equal,
    token for token, to rendering a whole conversation; ``supports_bridge`` tells whether there is any.

    A completion that was cut off gets the stop token it lacks *as prompt*: the contract binds the bridge to
    ``prompt + completion`` and leaves what follows to it, and a token nobody sampled must not be trained on. There is
    no bridge after unfinished reasoning, nor where another stop token was sampled than the one the template writes, nor
    where anything follows the stop token: the template has no form for such a conversation, so nothing can be proven
    about it. Some templates repeat the name of the called tool in front of its answer; after calls of several tools at
    once there is no bridge with these.

    Args:
        tokenizer: A tokenizer with a chat template, which from now on is the parser's alone.
        stop_token_ids: Ids that end an assistant turn.
        config: Its section of the run file.
        media: The model's images, or why messages cannot hold any.
    """

    name: ClassVar[str] = "chat_template"

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        config: ChatTemplateConfig | None = None,
        media: MediaProcessor | str = "the model takes text only",
    ) -> None:
        self.config = config or ChatTemplateConfig()
        self.template = ChatTemplate(
            tokenizer, stop_token_ids, self.config.chat_template_kwargs, self.config.control_tokens, media
        )
        self.supports_media = self.template.media is not None
        name = self.config.tool_format
        self.tool_format = tool_format(self.template) if name == "auto" else FORMATS[name]
        self.supports_tools = shows_tools(self.template) and not isinstance(self.tool_format, NoCalls)
        self.bridged_tails = bridged_tails(self.template) if self.config.bridge else frozenset()
        self._names_calls = names_calls(self.template, self.bridged_tails)
        if self._names_calls and isinstance(self.tool_format, NoCalls):
            self.bridged_tails = frozenset(tail for tail in self.bridged_tails if not tail.answers)
        self.supports_bridge = bool(self.bridged_tails)
        self._rendered: BoundedCache[list[int]] = BoundedCache(CACHE_CHARACTERS)
        self._suffixes: BoundedCache[Suffix] = BoundedCache(CACHE_CHARACTERS)
        self._parsed: BoundedCache[ParsedCompletion] = BoundedCache(CACHE_CHARACTERS)
        self._opened: BoundedCache[str] = BoundedCache(CACHE_CHARACTERS)
        self._schemas: BoundedCache[Schemas] = BoundedCache(CACHE_CHARACTERS)

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> ChatTemplateParser:
        """Load the tokenizer of a model folder (or hub name) for this parser alone.

        Raises:
            ConfigError: If there is no tokenizer, no chat template in it, or no token that ends a turn.
        """
        section = ChatTemplateConfig.model_validate({} if config is None else config)
        tokenizer = load_tokenizer(str(path), trust_remote_code=section.trust_remote_code, parser=cls.name)
        media = load_media(str(path), trust_remote_code=section.trust_remote_code)
        if not tokenizer.chat_template and isinstance(media, MediaProcessor):
            tokenizer.chat_template = media.chat_template
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of model {str(path)!r} has no chat template")
        return cls(tokenizer, stop_token_ids(str(path), tokenizer), section, media)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer whose template is rendered; what it truncates or pads for others does not reach a prompt."""
        return self.template.tokenizer

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """See `BaseParser.get_stop_token_ids`: the tokenizer's own first, then those of ``generation_config.json``."""
        return self.template.stop_token_ids

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `BaseParser.render`; what was rendered before comes from a cache. Raises what the template raises."""
        messages = self.template.resolved(messages)
        key = _key(messages, tools, add_generation_prompt)
        ids = self._rendered.get(key)
        if ids is None:
            rendered = self.template.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
            ids = self.template.encoder.encode(rendered)
            self._rendered.put(key, ids, len(key) + len(ids))
        return ids.copy()

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """See `BaseParser.parse_completion` and `rllm_renderers.formats.ToolFormat.read`.

        Nothing sampled vanishes from the text that a checker sees (see `Encoder.decode`). The result is
        immutable, and equal calls share it.
        """
        ids = token_ids(completion_ids)
        opened = "" if prompt_ids is None else self._opened_by(prompt_ids)
        tools_key = _write_key(list(tools)) if tools else ""
        key = (ids.tobytes(), opened, tools_key)
        parsed = self._parsed.get(key)
        if parsed is None:
            sampled = ids.tolist()
            stop = _first(sampled, self.template.stop_token_ids)
            parsed = self.tool_format.read(
                self.template.encoder.decode(sampled[:stop]),
                stopped=stop is not None,
                opened_by_prompt=opened,
                schemas=self._schemas_of(tools, tools_key) if tools else None,
            )
            self._parsed.put(key, parsed, 100 + 8 * len(sampled))
        return parsed

    def bridge_to_next_turn(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        completion_ids: Sequence[int] | TokenIds,
        new_messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> TokenIds | None:
        """See `BaseParser.bridge_to_next_turn`, and the class for when there is none."""
        tail = Tail.of(new_messages, tools)
        if not len(prompt_ids) or tail not in self.bridged_tails:
            return None
        completion = token_ids(completion_ids)
        parsed = self.parse_completion(completion, prompt_ids=prompt_ids, tools=tools)
        if parsed.reasoning_complete is False:
            return None
        called = None
        if self._names_calls and tail.answers:
            names = {call.name for call in parsed.ok_tool_calls}
            if len(names) != 1:
                return None
            [called] = names
        suffix = self._suffix(new_messages, tools, called)
        if suffix is None:
            return None
        sampled: list[int] = completion.tolist()
        stop = _first(sampled, self.template.stop_token_ids)
        if stop is not None and sampled[stop] != suffix.stop_id:
            return None
        if stop is not None and not set(sampled[stop:]).issubset(self.template.stop_token_ids):
            return None
        closing = [suffix.stop_id] if stop is None else []
        following = np.array([*closing, *suffix.token_ids], np.int32)
        bridged = np.concatenate((np.asarray(prompt_ids, np.int32), completion, following))
        bridged.setflags(write=False)  # handed on without a copy
        return bridged

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """See `BaseParser.count_control_tokens`."""
        return self.template.encoder.count(messages)

    def place_media(
        self, prompt_ids: Sequence[int] | TokenIds, messages: Sequence[MessageLike], *, start: int = 0
    ) -> tuple[PlacedMedia, ...]:
        """See `BaseParser.place_media`."""
        images = images_of(self.template.resolved(messages))
        if self.template.media is None or not images:
            return ()
        return self.template.media.place(token_ids(prompt_ids), images, start)

    def media_inputs(self, chunk: MediaChunk) -> ImageInputs:
        """What the vision part of the model reads for an image, see `MediaProcessor.inputs`."""
        if self.template.media is None:
            raise ValueError("this parser has no images")
        return self.template.media.inputs(chunk)

    def media_probe(self) -> tuple[TokenIds, tuple[PlacedMedia, ...]]:
        """A short prompt with one image, for backends that check how they read images."""
        if self.template.media is None:
            raise ValueError("this parser has no images")
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
            raise ConfigError("tokenize_and_mask: a conversation holds an image, but its rows are of tokens only")
        if method == "hf_template":
            return [masked_by_template(self.template, messages, tools)]
        return super().tokenize_and_mask(messages, tools=tools, method=method)

    def _schemas_of(self, tools: Sequence[ToolSpec], key: str) -> Schemas:
        schemas = self._schemas.get(key)
        if schemas is None:
            schemas = schemas_of(tools)
            self._schemas.put(key, schemas, len(key))
        return schemas

    def _suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None
    ) -> Suffix | None:
        new_messages = self.template.resolved(new_messages)
        key = (_key(new_messages, tools, True), called)
        suffix = self._suffixes.get(key)
        if suffix is None:
            suffix = self.template.suffix(new_messages, tools, called)
            if suffix is not None:
                self._suffixes.put(key, suffix, len(key[0]) + len(suffix.token_ids))
        return suffix

    def _opened_by(self, prompt_ids: Sequence[int] | TokenIds) -> str:
        """What a prompt already begins of the answer, such as its reasoning."""
        end = token_ids(prompt_ids[-GENERATION_PROMPT_TOKENS:])
        key = end.tobytes()
        opened = self._opened.get(key)
        if opened is None:
            opened = self.tool_format.opened_by(self.template.encoder.decode(end.tolist()))
            self._opened.put(key, opened, 100 + len(key))
        return opened


def _key(messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, add_generation_prompt: bool) -> str:
    """Everything a rendering depends on, as one string. Keys keep their order, because templates print it."""
    return _write_key([list(messages), list(tools or ()), add_generation_prompt])


def _first(ids: list[int], wanted: Sequence[int]) -> int | None:
    """Position of the first id that is one of ``wanted``."""
    return next((position for position, token in enumerate(ids) if token in wanted), None)

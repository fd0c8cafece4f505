"""``chat_template``: renders with the model folder's own template, and bridges turns by the suffix method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, field_validator

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, MaskedTokens, MaskMethod, ParsedCompletion, ToolSpec
from rllm_core.types import MessageLike, TokenIds, token_ids
from rllm_renderers.cache import BoundedCache
from rllm_renderers.completion import END_THINK, THINK, read_completion
from rllm_renderers.encoding import ControlTokens
from rllm_renderers.loading import load_tokenizer, stop_token_ids
from rllm_renderers.self_check import Tail, bridged_tails, shows_tools
from rllm_renderers.supervised import masked_by_template
from rllm_renderers.template import ChatTemplate, Suffix

CACHE_CHARACTERS = 16_000_000
GENERATION_PROMPT_TOKENS = 16

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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_DECIDED_BY_THE_PARSER.intersection(value)):
            raise ValueError(f"{taken[0]!r} is decided by the parser")
        return value


class ChatTemplateParser(BaseParser):
    """Renders with the tokenizer's own chat template; reads ``<think>`` and JSON in ``<tool_call>``.

    Bridging, the suffix method: a short made-up conversation whose assistant says a sentinel is rendered together with
    the new messages. What follows the first stop token after the sentinel is what every conversation goes on with; it
    is appended to the prompt and the completion as they are. So the prefix holds by construction, and reasoning stays
    in the prompt even where the template would drop it from a full rendering (``bridge = false`` turns this off).

    Bridging is on only for the kinds of tail in ``bridged_tails``, for which a check at construction found it equal,
    token for token, to rendering a whole conversation; ``supports_bridge`` tells whether there is any.

    A completion that was cut off gets the stop token it lacks *as prompt*: the contract binds the bridge to
    ``prompt + completion`` and leaves what follows to it, and a token nobody sampled must not be trained on. There is
    no bridge after unfinished reasoning, nor where another stop token was sampled than the one the template writes:
    the template has no form for such a conversation, so nothing can be proven about it.

    Args:
        tokenizer: A tokenizer with a chat template, which from now on is the parser's alone.
        stop_token_ids: Ids that end an assistant turn.
        config: Its section of the run file.
    """

    name: ClassVar[str] = "chat_template"

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], config: ChatTemplateConfig | None = None) -> None:
        self.config = config or ChatTemplateConfig()
        self.template = ChatTemplate(
            tokenizer, stop_token_ids, self.config.chat_template_kwargs, self.config.control_tokens
        )
        self.supports_tools = shows_tools(self.template)
        self.bridged_tails = bridged_tails(self.template) if self.config.bridge else frozenset()
        self.supports_bridge = bool(self.bridged_tails)
        self._rendered: BoundedCache[list[int]] = BoundedCache(CACHE_CHARACTERS)
        self._suffixes: BoundedCache[Suffix] = BoundedCache(CACHE_CHARACTERS)
        self._parsed: BoundedCache[ParsedCompletion] = BoundedCache(CACHE_CHARACTERS)
        self._opened: BoundedCache[bool] = BoundedCache(CACHE_CHARACTERS)

    @classmethod
    def from_model(cls, path: str | Path, config: BaseModel | None = None) -> ChatTemplateParser:
        """Load the tokenizer of a model folder (or hub name) for this parser alone.

        Raises:
            ConfigError: If there is no tokenizer, no chat template in it, or no token that ends a turn.
        """
        section = ChatTemplateConfig.model_validate({} if config is None else config)
        tokenizer = load_tokenizer(str(path), trust_remote_code=section.trust_remote_code)
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of model {str(path)!r} has no chat template")
        return cls(tokenizer, stop_token_ids(str(path), tokenizer), section)

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
        """See `BaseParser.parse_completion` and `rllm_renderers.completion.read_completion`.

        Nothing sampled vanishes from the text that a checker sees (see `Encoder.decode`). The result is
        immutable, and equal calls share it.
        """
        ids = token_ids(completion_ids)
        opened = prompt_ids is not None and self._opens_reasoning(prompt_ids)
        names = _tool_names(tools) if tools else None
        key = (ids.tobytes(), opened, names)
        parsed = self._parsed.get(key)
        if parsed is None:
            sampled = ids.tolist()
            stop = _first(sampled, self.template.stop_token_ids)
            parsed = read_completion(
                self.template.encoder.decode(sampled[:stop]),
                stopped=stop is not None,
                opened_by_prompt=opened,
                tool_names=names,
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
    ) -> list[int] | None:
        """See `BaseParser.bridge_to_next_turn`, and the class for when there is none."""
        if not len(prompt_ids) or Tail.of(new_messages, tools) not in self.bridged_tails:
            return None
        suffix = self._suffix(new_messages, tools)
        if suffix is None:
            return None
        completion = token_ids(completion_ids)
        sampled: list[int] = completion.tolist()
        stop = _first(sampled, self.template.stop_token_ids)
        if stop is not None and sampled[stop] != suffix.stop_id:
            return None
        if self.parse_completion(completion, prompt_ids=prompt_ids, tools=tools).reasoning_complete is False:
            return None
        closing = [suffix.stop_id] if stop is None else []
        return [*token_ids(prompt_ids).tolist(), *sampled, *closing, *suffix.token_ids]

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """See `BaseParser.count_control_tokens`."""
        return self.template.encoder.count(messages)

    def tokenize_and_mask(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        method: MaskMethod = "cumulative",
    ) -> list[MaskedTokens]:
        """See `BaseParser.tokenize_and_mask`; ``hf_template`` is transformers' own mask."""
        if method == "hf_template":
            return [masked_by_template(self.template, messages, tools)]
        return super().tokenize_and_mask(messages, tools=tools, method=method)

    def _suffix(self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> Suffix | None:
        key = _key(new_messages, tools, True)
        suffix = self._suffixes.get(key)
        if suffix is None:
            suffix = self.template.suffix(new_messages, tools)
            if suffix is not None:
                self._suffixes.put(key, suffix, len(key) + len(suffix.token_ids))
        return suffix

    def _opens_reasoning(self, prompt_ids: Sequence[int] | TokenIds) -> bool:
        """Whether a prompt ends inside reasoning that it opened itself."""
        end = token_ids(prompt_ids[-GENERATION_PROMPT_TOKENS:])
        key = end.tobytes()
        opens = self._opened.get(key)
        if opens is None:
            _, think, after = self.template.encoder.decode(end.tolist()).rpartition(THINK)
            opens = bool(think) and END_THINK not in after and not after.strip()
            self._opened.put(key, opens, 100 + len(key))
        return opens


def _key(messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, add_generation_prompt: bool) -> str:
    """Everything a rendering depends on, as one string. Keys keep their order, because templates print it."""
    return _write_key([list(messages), list(tools or ()), add_generation_prompt])


def _first(ids: list[int], wanted: Sequence[int]) -> int | None:
    """Position of the first id that is one of ``wanted``."""
    return next((position for position, token in enumerate(ids) if token in wanted), None)


def _tool_names(tools: Sequence[ToolSpec]) -> frozenset[str]:
    """Names from specifications, flat or in OpenAI's envelope."""
    return frozenset(tool.get("function", tool).get("name", "") for tool in tools)

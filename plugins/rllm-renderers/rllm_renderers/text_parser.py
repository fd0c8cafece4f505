"""What parsers have in common that write text: rendering, reading, and continuing conversations token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser, ParsedCompletion, ParsedToolCall, ToolSpec
from rllm_core.types import MessageLike, SampledMessage, TokenIds, freeze, token_ids
from rllm_renderers.cache import BoundedCache
from rllm_renderers.encoding import map_text
from rllm_renderers.formats import NoCalls, ToolFormat, schemas_of
from rllm_renderers.probes import QUESTION, Suffix, Tail, bridged_tails, names_calls, shows_tools
from rllm_renderers.template import Template

CACHE_CHARACTERS = 16_000_000
GENERATION_PROMPT_TOKENS = 32

_write_key = json.JSONEncoder(default=dict).encode


class TextParser(BaseParser):
    """Renders with a template; reads reasoning, and tool calls in the format that it writes.

    ``supports_tools`` means that the template shows tools to the model and that the format of calls is known; where
    ``tool_format`` is `NoCalls`, what may be a call is content.

    Bridging, the suffix method: a short made-up conversation whose assistant says a sentinel is rendered together with
    the new messages. What follows the first stop token after the sentinel is what every conversation goes on with; it
    is appended to the prompt and the completion as they are. So the prefix holds by construction, and reasoning stays
    in the prompt even where the template would drop it from a full rendering (``bridge = false`` turns this off).

    Bridging is on only for the kinds of tail in ``bridged_tails``, for which the corpus of `rllm_renderers.probes`
    found it equal, token for token, to rendering a whole conversation; ``supports_bridge`` tells whether there is any.

    A completion that was cut off gets the stop token it lacks *as prompt*: the contract binds the bridge to
    ``prompt + completion`` and leaves what follows to it, and a token nobody sampled must not be trained on. There is
    no bridge after unfinished reasoning, nor where another stop token was sampled than the one the template writes, nor
    where anything follows the stop token: the template has no form for such a conversation, so nothing can be proven
    about it. Some templates repeat the name of the called tool in front of its answer; after calls of several tools at
    once there is no bridge with these.

    Args:
        template: What writes conversations.
        tool_format: How calls are written.
        bridge: Whether to look for tails that can be continued.

    Raises:
        ConfigError: If no conversation could be both written and read.
    """

    def __init__(self, template: Template, tool_format: ToolFormat, *, bridge: bool) -> None:
        self.template = template
        self.tool_format = tool_format
        self.supports_media = template.media is not None
        self.supports_tools = shows_tools(template) and not isinstance(tool_format, NoCalls)
        if not self.supports_tools and template.ids_or_none([QUESTION]) is None:
            raise ConfigError(
                f"{template.what} of this model accepts only conversations with tools, and writes calls in an unknown "
                "format: set chat_template.tool_format if you know it, or put another chat template into the model "
                "folder"
            )
        with_image = None if template.media is None else template.media.with_probe
        self.bridged_tails = bridged_tails(template, tool_format.reasoning_tags, with_image) if bridge else frozenset()
        self._names_calls = names_calls(template, self.bridged_tails)
        if self._names_calls and isinstance(tool_format, NoCalls):
            self.bridged_tails = frozenset(tail for tail in self.bridged_tails if not tail.answers)
        self.supports_bridge = bool(self.bridged_tails)
        # The rollouts of a group ask the same first question, and are often told the same next.
        self._rendered: BoundedCache[list[int]] = BoundedCache(CACHE_CHARACTERS)
        self._suffixes: BoundedCache[Suffix] = BoundedCache(CACHE_CHARACTERS)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer whose template is rendered; what it truncates or pads for others does not reach a prompt."""
        return self.template.tokenizer

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """See `BaseParser.get_stop_token_ids`."""
        return self.template.stop_token_ids

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """See `BaseParser.render`; what was rendered before comes from a cache.

        Raises:
            ConfigError: If a message holds something that the model does not take.
            RefusedConversation: If the template does not take the conversation.
        """
        messages = self.template.resolved(messages)
        # What was sampled is rendered in its own way, and not for the first time in a group.
        key = (
            "" if any(type(one) is SampledMessage for one in messages) else _key(messages, tools, add_generation_prompt)
        )
        ids = self._rendered.get(key) if key else None
        if ids is None:
            rendered = self.template.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
            ids = self.template.encoder.encode(rendered)
            if key:
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

        Nothing sampled vanishes from the text that a checker sees (see `Encoder.decode`), and only control tokens that
        were sampled as such are read as these: text that spells them is text.
        """
        sampled: list[int] = token_ids(completion_ids).tolist()
        stop = _first(sampled, self.template.stop_token_ids)
        encoder = self.template.encoder
        opened = ""
        if prompt_ids is not None:
            end = token_ids(prompt_ids[-GENERATION_PROMPT_TOKENS:]).tolist()
            opened = self.tool_format.opened_by(encoder.decode_marked(end))
        parsed = self.tool_format.read(
            encoder.decode_marked(sampled[:stop]),
            stopped=stop is not None,
            opened_by_prompt=opened,
            schemas=schemas_of(tools) if tools else None,
        )
        return ParsedCompletion(
            encoder.unmark(parsed.content),
            None if parsed.reasoning is None else encoder.unmark(parsed.reasoning),
            tuple(self._unmarked(call) for call in parsed.tool_calls),
            parsed.termination,
            parsed.reasoning_complete,
        )

    def _unmarked(self, call: ParsedToolCall) -> ParsedToolCall:
        unmark = self.template.encoder.unmark
        return replace(
            call,
            name=None if call.name is None else unmark(call.name),
            arguments=None if call.arguments is None else freeze(map_text(call.arguments, unmark)),
            raw=unmark(call.raw),
        )

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
        if self._names_calls and any(one.get("role") == "tool" for one in new_messages):
            names = {call.name for call in parsed.ok_tool_calls}
            if len(names) != 1:
                return None
            [called] = names
        suffix = self._suffix(new_messages, tools, called)
        return None if suffix is None else bridged(prompt_ids, completion, suffix, self.template.stop_token_ids)

    def count_control_tokens(self, messages: Sequence[MessageLike]) -> int:
        """See `BaseParser.count_control_tokens`."""
        return self.template.encoder.count(messages)

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


def bridged(
    prompt_ids: Sequence[int] | TokenIds, completion: TokenIds, suffix: Suffix, stops: Sequence[int]
) -> TokenIds | None:
    """Prompt, completion and suffix in one; None if it ended with another stop token, or went on after it."""
    sampled: list[int] = completion.tolist()
    stop = _first(sampled, stops)
    if stop is not None and (sampled[stop] != suffix.stop_id or not set(sampled[stop:]).issubset(stops)):
        return None
    closing = [suffix.stop_id] if stop is None else []
    following = np.array([*closing, *suffix.token_ids], np.int32)
    ids = np.concatenate((np.asarray(prompt_ids, np.int32), completion, following))
    ids.setflags(write=False)  # handed on without a copy
    return ids


def _key(messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, add_generation_prompt: bool) -> str:
    """Everything a rendering depends on, as one string. Keys keep their order, because templates print it."""
    return _write_key([list(messages), list(tools or ()), add_generation_prompt])


def _first(ids: list[int], wanted: Sequence[int]) -> int | None:
    """Position of the first id that is one of ``wanted``."""
    return next((position for position, token in enumerate(ids) if token in wanted), None)

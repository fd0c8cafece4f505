"""Base of parsers that write text: renders, parses, and continues conversations token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllm_core.errors import ConfigError
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, ParsedToolCall, ToolSpec
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
    """Renders with a template; parses reasoning, and tool calls in the template's format.

    ``supports_tools`` means that the template shows tools to the model and that the format of calls is known. If
    ``tool_format`` is `NoCalls`, possible calls are content.

    Bridging uses the suffix method. The parser renders a short artificial conversation, in which the assistant says a
    sentinel, together with the new messages. The tokens after the first stop token behind the sentinel continue every
    conversation; they are appended to the unchanged prompt and completion. The prefix is therefore kept by
    construction. Reasoning stays in the prompt even if a full rendering would drop it (``bridge = false`` turns this
    off).

    Only the kinds of tail in ``bridged_tails`` are bridged. For these, the corpus of `rllm_renderers.probes` showed
    that bridging equals, token for token, rendering the whole conversation. ``supports_bridge`` is True if there are
    any.

    A truncated completion gets its missing stop token *as prompt*. The contract requires only that the bridge starts
    with ``prompt + completion``, and a token the policy did not sample must not be trained on. The template has no form
    for some conversations, so nothing can be proven about them and they are not bridged: after unfinished reasoning,
    after a stop token other than the template's, and if anything follows the stop token. Some templates repeat the name
    of the called tool before its result; with these, calls of several tools at once are not bridged.

    Args:
        template: Template that writes conversations.
        tool_format: Format of tool calls.
        bridge: Whether to search for tails that can be bridged.

    Raises:
        ConfigError: If no conversation can be both written and parsed.
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
        # Rollouts of a group share the first prompt and so its end, and often the next messages too.
        self._rendered: BoundedCache[list[int]] = BoundedCache(CACHE_CHARACTERS)
        self._suffixes: BoundedCache[Suffix] = BoundedCache(CACHE_CHARACTERS)
        self._openings: BoundedCache[str] = BoundedCache(CACHE_CHARACTERS // 16)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the template; truncation or padding set on it does not affect prompts."""
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
        """See `BaseParser.render`; repeated renderings come from a cache.

        Raises:
            ConfigError: If a message contains something the model does not support.
            RefusedConversation: If the template rejects the conversation, or leaves out a message.
        """
        messages = self.template.resolved(messages)
        # Do not cache conversations with sampled messages: their rendering depends on the sampled tokens, and they are
        # not the first prompt that a group shares.
        key = (
            "" if any(type(one) is SampledMessage for one in messages) else _key(messages, tools, add_generation_prompt)
        )
        ids = self._rendered.get(key) if key else None
        if ids is None:
            rendered = self.template.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
            self.template.check_roles(messages, tools)
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

        No sampled token disappears from the text that a reward function sees (see `Encoder.decode`). Only control
        tokens that were sampled as such are parsed as control tokens; text that spells them stays text.
        """
        sampled: list[int] = token_ids(completion_ids).tolist()
        stop = _first(sampled, self.template.stop_token_ids)
        encoder = self.template.encoder
        opened = "" if prompt_ids is None else self._opened_by(token_ids(prompt_ids[-GENERATION_PROMPT_TOKENS:]))
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

    def _opened_by(self, prompt_end: TokenIds) -> str:
        """Returns the beginning of the answer that the prompt already contains, see `ToolFormat.opened_by`."""
        key = prompt_end.tobytes()
        opened = self._openings.get(key)
        if opened is None:
            opened = self.tool_format.opened_by(self.template.encoder.decode_marked(prompt_end.tolist()))
            self._openings.put(key, opened, len(key))
        return opened

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
    ) -> Appended | None:
        """See `BaseParser.bridge_to_next_turn`; the class lists the exceptions."""
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
) -> Appended | None:
    """Appends the suffix; None if the completion has another stop token, or continues after it."""
    sampled: list[int] = completion.tolist()
    stop = _first(sampled, stops)
    if stop is not None and (sampled[stop] != suffix.stop_id or not set(sampled[stop:]).issubset(stops)):
        return None
    closing = [suffix.stop_id] if stop is None else []
    return Appended(prompt_ids, completion, np.array([*closing, *suffix.token_ids], np.int32))


def _key(messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, add_generation_prompt: bool) -> str:
    """Returns everything a rendering depends on, as one string. Keys keep their order, because templates print it."""
    return _write_key([list(messages), list(tools or ()), add_generation_prompt])


def _first(ids: list[int], wanted: Sequence[int]) -> int | None:
    """Returns the position of the first id in ``wanted``, or None."""
    return next((position for position, token in enumerate(ids) if token in wanted), None)

"""One of the cookbook's renderers with its tokenizer: conversations to ids, bridge suffixes, and capabilities.

Capabilities are probed by rendering short conversations, as parser ``chat_template`` does with templates.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from rllm_renderers.encoding import Encoder
from rllm_renderers.probes import QUESTION, Suffix, after, made_up_history, shows_tools

from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike
from rllm_tinker import cookbook


class Rendering:
    """A renderer with its tokenizer. Picklable, unlike the cookbook's renderers with a tokenizer from a folder.

    Args:
        name: Name of the renderer.
        tokenizer: Fast tokenizer.
        encoder: Encoder with a private copy of the tokenizer.

    Attributes:
        encoder: Converts text to ids and back.
        stop_token_ids: Ids that end a turn.
        shows_tools: Whether the renderer prints tools; if it rejects them, it gets none.
        opens_reasoning: Whether prompts end with the start of reasoning.
    """

    def __init__(self, name: str, tokenizer: Any, encoder: Encoder) -> None:
        self._made_of = (name, tokenizer, encoder)
        self.encoder = encoder
        self._chat_template = tokenizer if tokenizer.chat_template else None
        facade = cookbook.CookbookTokenizer(tokenizer, encoder)
        self._renderer = cookbook.make_renderer(name, facade)
        self.stop_token_ids = cookbook.stop_token_ids(name, self._renderer, facade)
        self.shows_tools = self._writes_reasoning = True
        self.shows_tools = shows_tools(self)
        thoughtful = {"role": "assistant", "content": "Yes", "reasoning_content": "Why not"}
        self._writes_reasoning = self.ids_or_none([QUESTION, thoughtful, QUESTION]) is not None
        self.opens_reasoning = encoder.decode(self.ids([QUESTION])).rstrip().endswith("<think>")

    def __reduce__(self) -> tuple[type[Rendering], tuple[str, Any, Encoder]]:
        return (type(self), self._made_of)

    def ids(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders a conversation to token ids.

        Raises:
            ConfigError: If a message contains anything but text.
            Rejected: If the renderer rejects the conversation.
        """
        # Drop reasoning for families without it, as their chat templates do; their renderers would reject it.
        plain = [
            cookbook.cookbook_message(one, with_reasoning=self._writes_reasoning)
            for one in self.encoder.protect(_with_names(messages))
        ]
        offered: list[dict[str, Any]] = []
        if tools and self.shows_tools:
            offered = [cookbook.cookbook_tool(self.encoder.escape(dict(tool))) for tool in tools]
        return cookbook.rendered(self._renderer, plain, offered, add_generation_prompt=add_generation_prompt)

    def ids_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int] | None:
        """Returns `ids`, or None if the renderer rejects the conversation."""
        try:
            return self.ids(messages, tools, add_generation_prompt=add_generation_prompt)
        except cookbook.ConversationRejected:
            return None

    def read(self, sampled: Sequence[int], stop: int | None) -> tuple[Mapping[str, Any], bool] | None:
        """Parses a completion with the renderer.

        Args:
            sampled: Token ids sampled before the first stop token.
            stop: Sampled stop token. If None, parses as if the first of ``stop_token_ids`` had been sampled.

        Returns:
            The message, and whether it ended cleanly. None if the completion contains JSON that Python rejects, such
            as numbers with thousands of digits or thousands of nested levels.
        """
        exceptions = importlib.import_module("tinker_cookbook.exceptions")
        closing = self.stop_token_ids[0] if stop is None else stop
        try:
            said, ending = self._renderer.parse_response([*sampled, closing])
        except (exceptions.RendererError, RecursionError, ValueError):
            return None
        return said, bool(ending.is_clean)

    def suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None = None
    ) -> Suffix | None:
        """Returns the tokens that append ``new_messages`` to an assistant message; None if they are not separable.

        Args:
            new_messages: Messages after the assistant message.
            tools: Available tools.
            called: Name of the called tool, for results that do not name it.
        """
        ids = self.ids_or_none([*made_up_history(new_messages, called), *new_messages], tools)
        return None if ids is None else after(self, ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder.decode`."""
        return self.encoder.decode(ids)

    def compared_with_template(self) -> str:
        """Describes how the prompt for a first question compares with that of the model's chat template."""
        if self._chat_template is None:
            return "none in the model folder"
        conversation = [{"role": "system", "content": "Be brief."}, QUESTION]
        text = self._chat_template.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        same = self.encoder.encode(text) == self.ids_or_none(conversation)
        return (
            "writes the same prompt for a first question" if same else "writes a different prompt for a first question"
        )


def _with_names(messages: Sequence[MessageLike]) -> list[MessageLike]:
    """Adds the called tool's name to tool results, because some renderers print it."""
    names: dict[Any, Any] = {}
    named: list[MessageLike] = []
    for one in messages:
        for call in one.get("tool_calls") or ():
            names[call.get("id")] = call.get("function", call).get("name")
        known = names.get(one.get("tool_call_id")) if one.get("role") == "tool" and not one.get("name") else None
        named.append({**one, "name": known} if known else one)
    return named

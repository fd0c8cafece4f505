"""A model's chat template and tokenizer, as text and as tokens, and what follows an assistant's message in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike
from rllm_renderers.encoding import ControlTokens, Encoder

_SENTINEL = "sentinel0of0an0answer"
# What templates raise on conversations they do not take, on purpose or not.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError)


@dataclass(frozen=True)
class Suffix:
    """The stop token a template writes after an assistant's message, and the tokens that follow it."""

    stop_id: int
    token_ids: list[int]


class ChatTemplate:
    """A tokenizer with its template.

    The tokenizer only renders; text becomes ids and ids become text in a private `Encoder`, so that nobody who
    truncates or pads with the tokenizer reaches a prompt.

    Args:
        tokenizer: A tokenizer with a chat template.
        stop_token_ids: Ids that end an assistant's turn.
        variables: Variables of the template.
        control_tokens: What becomes of text from outside that spells control tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any],
        control_tokens: ControlTokens = "neutralise",
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self.variables = dict(variables)
        self._stop_ids_by_text = {tokenizer.convert_ids_to_tokens(token): token for token in self.stop_token_ids}
        longest_first = sorted(self._stop_ids_by_text, key=len, reverse=True)
        self._stop_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.encoder = Encoder(tokenizer, control_tokens)

    def text(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation as the model reads it; raises what the template raises."""
        return self.encoder.unmark(self.rendered(messages, tools, add_generation_prompt=add_generation_prompt))

    def rendered(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation for `Encoder.encode`; raises what the template raises."""
        text: str = self.tokenizer.apply_chat_template(
            [_for_template(message) for message in self.encoder.protect(messages)],
            tools=[self.encoder.escape(dict(tool)) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )
        return text

    def rendered_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        """The rendered conversation for `Encoder.encode`, or None if the template refuses it."""
        try:
            return self.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        except _REFUSALS:
            return None

    def first_stop(self, text: str, position: int) -> tuple[int, int] | None:
        """Where the first stop token at or after ``position`` begins and ends."""
        found = self._stop_pattern.search(text, position)
        return found.span() if found is not None else None

    def suffix(self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> Suffix | None:
        """What follows an assistant's message when ``new_messages`` come next; None if that cannot be told apart."""
        text = self.rendered_or_none([*_made_up_history(new_messages), *new_messages], tools)
        at = text.find(_SENTINEL) if text is not None else -1
        if text is None or at < 0:
            return None
        stop = self.first_stop(text, at + len(_SENTINEL))
        if stop is None:
            return None
        # Encoded with the stop token in front: some tokenizers treat the beginning of a text differently.
        begin, end = stop
        first, *following = self.encoder.encode(text[begin:])
        return Suffix(first, following) if first == self._stop_ids_by_text[text[begin:end]] else None


def made_up_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in the shape templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _made_up_history(new_messages: Sequence[MessageLike]) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
    calls = [
        made_up_call(message.get("tool_call_id") or f"call_{position}", message.get("name") or "made_up", {})
        for position, message in enumerate(new_messages)
        if message["role"] == "tool"
    ]
    if calls:
        answer["tool_calls"] = calls
    return [{"role": "user", "content": "?"}, answer]


def _for_template(message: MessageLike) -> dict[str, Any]:
    """A message as templates expect it: tool calls' arguments as data, not as the JSON text that APIs exchange."""
    plain = dict(message)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
    return plain


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        data = json.loads(arguments)
    except (ValueError, RecursionError):  # the template gets the text as it is
        return call
    return {**call, "function": {**function, "arguments": data}}

"""A model's chat template and tokenizer, as text and as tokens, and what follows an assistant's message in it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
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

    Args:
        tokenizer: A tokenizer with a chat template.
        stop_token_ids: Ids that end an assistant's turn.
        variables: Variables of the template.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], variables: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self.variables = dict(variables)
        self._stop_ids_by_text = {tokenizer.convert_ids_to_tokens(token): token for token in self.stop_token_ids}
        longest_first = sorted(self._stop_ids_by_text, key=len, reverse=True)
        self._stop_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._known_ids = len(tokenizer)

    def text(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation; raises what the template raises."""
        text: str = self.tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )
        return text

    def text_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        """The rendered conversation, or None if the template refuses it."""
        try:
            return self.text(messages, tools, add_generation_prompt=add_generation_prompt)
        except _REFUSALS:
            return None

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; special tokens in it are read as such, and none are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, with nothing left out.

        Special tokens stay visible. So do ids that the tokenizer does not know, since a model's vocabulary may be
        padded beyond its tokenizer's: they show as U+FFFD.
        """
        if not ids or max(ids) < self._known_ids:
            return self._decode_known(ids)
        runs = itertools.groupby(ids, key=lambda token: self.tokenizer.convert_ids_to_tokens(token) is not None)
        return "".join(
            self._decode_known(list(run)) if is_known else _REPLACEMENT * len(list(run)) for is_known, run in runs
        )

    def _decode_known(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def first_stop(self, text: str, position: int) -> tuple[int, int] | None:
        """Where the first stop token at or after ``position`` begins and ends."""
        found = self._stop_pattern.search(text, position)
        return found.span() if found is not None else None

    def suffix(self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> Suffix | None:
        """What follows an assistant's message when ``new_messages`` come next; None if that cannot be told apart."""
        text = self.text_or_none([*_made_up_history(new_messages), *new_messages], tools)
        at = text.find(_SENTINEL) if text is not None else -1
        if text is None or at < 0:
            return None
        stop = self.first_stop(text, at + len(_SENTINEL))
        if stop is None:
            return None
        # Encoded with the stop token in front: some tokenizers treat the beginning of a text differently.
        begin, end = stop
        first, *following = self.encode(text[begin:])
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

"""A model's chat template and tokenizer, as text and as tokens, and what follows an assistant's message in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from rllm_core.errors import ConfigError
from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike
from rllm_renderers.encoding import ControlTokens, Encoder
from rllm_renderers.media import MediaProcessor, has_media, images_of

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
        media: The model's images, or why messages cannot hold any.

    Raises:
        ConfigError: If the placeholder of ``media`` is no control token of the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any],
        control_tokens: ControlTokens = "neutralise",
        media: MediaProcessor | str = "the model takes text only",
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self.variables = dict(variables)
        self._stop_ids_by_text = {tokenizer.convert_ids_to_tokens(token): token for token in self.stop_token_ids}
        longest_first = sorted(self._stop_ids_by_text, key=len, reverse=True)
        self._stop_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.encoder = Encoder(tokenizer, control_tokens)
        self.media, self._why_no_media = (None, media) if isinstance(media, str) else (media, "")
        if self.media is not None:
            self.media.check_placeholder(self.encoder.control_tokens)
        self._writes_text_in_parts_only = False
        self._writes_text_in_parts_only = self._wants_text_in_parts()
        self._writes_arguments_as_text = False
        self._writes_arguments_as_text = self._wants_arguments_as_text()

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
        messages = self.resolved(messages)
        placeholder = "" if self.media is None else self.media.placeholder
        text: str = self.tokenizer.apply_chat_template(
            [self.for_template(message) for message in self.encoder.protect(messages, placeholder=placeholder)],
            tools=[self.encoder.escape(dict(tool)) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )
        return text if self.media is None else self.media.expanded(text, images_of(messages))

    def resolved(self, messages: Sequence[MessageLike]) -> Sequence[MessageLike]:
        """Messages with their images read, see `MediaProcessor.resolve`.

        Raises:
            ConfigError: If there are any, but the model or this installation takes text only.
        """
        if not has_media(messages):
            return messages
        if self.media is None:
            raise ConfigError(f"a message holds an image, but {self._why_no_media}")
        return self.media.resolve(messages)

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

    def suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None = None
    ) -> Suffix | None:
        """What follows an assistant's message when ``new_messages`` come next; None if that cannot be told apart.

        Args:
            new_messages: What comes next.
            tools: The tools on offer.
            called: The tool that the assistant called, for templates that repeat its name in front of its answer.
        """
        text = self.rendered_or_none([*_made_up_history(new_messages, called), *new_messages], tools)
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

    def _wants_text_in_parts(self) -> bool:
        """Whether the template leaves text out that does not come in parts, as those of some vision models do."""
        if self.media is None or _SENTINEL in (self.rendered_or_none([{"role": "user", "content": _SENTINEL}]) or ""):
            return False
        in_parts = [{"role": "user", "content": [{"type": "text", "text": _SENTINEL}]}]
        return _SENTINEL in (self.rendered_or_none(in_parts) or "")

    def _wants_arguments_as_text(self) -> bool:
        """Whether the template joins a call's arguments to other text, instead of writing data as JSON."""
        call = made_up_call("call00001", "made_up", {"key": 1})
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": "?"}, answer]
        from_data = self.rendered_or_none(messages, add_generation_prompt=False)
        if from_data is not None and "{'key'" not in from_data:
            return False
        self._writes_arguments_as_text = True
        return self.rendered_or_none(messages, add_generation_prompt=False) is not None

    def for_template(self, message: MessageLike) -> dict[str, Any]:
        """A message with its text and its tool calls' arguments in the form that the template writes."""
        plain = dict(message)
        if self._writes_text_in_parts_only and isinstance(plain.get("content"), str):
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        if plain.get("tool_calls"):
            convert = _as_text if self._writes_arguments_as_text else _as_data
            plain["tool_calls"] = [_with_arguments(call, convert) for call in plain["tool_calls"]]
        return plain


def made_up_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in the shape templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _made_up_history(new_messages: Sequence[MessageLike], called: str | None) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
    calls = [
        # Some templates leave out the answer's text where there is a call.
        made_up_call(message.get("tool_call_id") or f"call0000{position}", called or "made_up", {"of": _SENTINEL})
        for position, message in enumerate(new_messages)
        if message["role"] == "tool"
    ]
    if calls:
        answer["tool_calls"] = calls
    return [{"role": "user", "content": "?"}, answer]


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _as_data(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # the template gets the text as it is
        return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

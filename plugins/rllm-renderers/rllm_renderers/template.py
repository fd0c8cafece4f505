"""Templates that write conversations as text: a model's chat template, or a family of the package.

A private `Encoder` tokenizes the whole text at once. Tokens thus do not depend on how a conversation is split into
pieces, and the two kinds of template can be compared character by character.
"""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from rllm_core.errors import ConfigError, RefusedConversation
from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike, SampledMessage, message
from rllm_renderers.encoding import Encoder
from rllm_renderers.media import MediaProcessor, has_media, images_of
from rllm_renderers.package import Family, TextTokenizer
from rllm_renderers.probes import QUESTION, TOOL, Suffix, has_answers, made_up_call, made_up_history

USUAL_ROLES = ("system", "user", "assistant", "tool")
_SENTINEL = "sentinel0of0an0answer"
# Errors that templates and families raise on conversations they reject, deliberately or not.
_REJECTIONS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


class Template(ABC):
    """Writes conversations for one tokenizer.

    The tokenizer only renders. A private `Encoder` encodes and decodes, so that truncation or padding set on the
    tokenizer does not affect prompts.

    Args:
        tokenizer: Tokenizer of the model.
        encoder: Private copy of the tokenizer.
        stop_token_ids: Ids that end an assistant turn.
        media: Image processor of the model, or the reason why messages cannot contain images.
    """

    what = "the chat template"

    def __init__(
        self,
        tokenizer: Any,
        encoder: Encoder,
        stop_token_ids: Sequence[int],
        media: MediaProcessor | str = "the model takes text only",
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.stop_token_ids = tuple(stop_token_ids)
        self._stop_ids_by_text = {tokenizer.convert_ids_to_tokens(token): token for token in self.stop_token_ids}
        longest_first = sorted(self._stop_ids_by_text, key=len, reverse=True)
        self._stop_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.media = None if isinstance(media, str) else media
        self._why_no_media = media if isinstance(media, str) else ""
        if self.media is not None:
            self.media.check_placeholder(self.encoder.control_tokens)

    @abstractmethod
    def _write(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """Returns the text of protected messages; raises one of `_REJECTIONS` if it rejects them."""

    def text(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the rendered conversation as the model reads it; raises the same errors as `rendered`."""
        return self.encoder.unmark(self.rendered(messages, tools, add_generation_prompt=add_generation_prompt))

    def rendered(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the rendered conversation for `Encoder.encode`.

        Raises:
            ConfigError: If a message contains something the model does not support.
            RefusedConversation: If the conversation is rejected.
        """
        messages = self.resolved(messages)
        placeholder = "" if self.media is None else self.media.placeholder
        try:
            protected = self.encoder.protect(messages, placeholder=placeholder)
            text = self._write(
                [self.for_template(one) for one in protected],
                [self.encoder.escape(dict(tool)) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except _REJECTIONS as error:
            if any(type(one) is SampledMessage and one.completions for one in messages):
                # Some templates reject control tokens that a model left in its content. Retry with these as text.
                as_text = [SampledMessage(one, ()) if type(one) is SampledMessage else one for one in messages]
                return self.rendered(as_text, tools, add_generation_prompt=add_generation_prompt)
            reason = " ".join((str(error) or type(error).__name__).split())
            raise RefusedConversation(f"{self.what} does not accept this conversation: {reason}") from error
        return text if self.media is None else self.media.expanded(text, images_of(messages))

    def check_roles(self, messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> None:
        """Checks that no message is left out: some templates write only the roles that they know.

        Raises:
            RefusedConversation: If a message is left out.
        """
        for position, one in enumerate(messages):
            if one.get("role") not in USUAL_ROLES and one.get("content"):
                marked = [*messages[:position], {**one, "content": _SENTINEL}, *messages[position + 1 :]]
                text = self.rendered_or_none(marked, tools)
                if text is not None and _SENTINEL not in text:
                    raise RefusedConversation(
                        f"{self.what} does not accept this conversation: it leaves out messages of role "
                        f"{one.get('role')!r:.40}; use one of {', '.join(USUAL_ROLES)}"
                    )

    def resolved(self, messages: Sequence[MessageLike]) -> Sequence[MessageLike]:
        """Returns messages with their images read, see `MediaProcessor.resolve`.

        Raises:
            ConfigError: If there are images, but the model or this installation supports text only.
        """
        for one in messages:
            if not isinstance(one, Mapping):
                message(one)  # Raises an error that describes the problem.
        if not has_media(messages):
            return messages
        if self.media is None:
            raise ConfigError(f"a message contains an image, but {self._why_no_media}")
        return self.media.resolve(messages)

    def rendered_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        """Returns the rendered conversation for `Encoder.encode`, or None if it is rejected."""
        try:
            return self.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        except ValueError:
            return None

    def ids_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int] | None:
        """See `rllm_renderers.probes.Rendering`."""
        text = self.rendered_or_none(messages, tools, add_generation_prompt=add_generation_prompt)
        return None if text is None else self.encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder.decode`."""
        return self.encoder.decode(ids)

    def first_stop(self, text: str, position: int) -> tuple[int, int] | None:
        """Returns start and end of the first stop token at or after ``position``, or None."""
        found = self._stop_pattern.search(text, position)
        return found.span() if found is not None else None

    def suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None = None
    ) -> Suffix | None:
        """Returns the suffix that appends ``new_messages`` to an assistant message, or None if it is not separable.

        Args:
            new_messages: Messages that follow.
            tools: Offered tools.
            called: Tool that the assistant called, for templates that repeat its name before its result.
        """
        text = self.rendered_or_none([*made_up_history(new_messages, called), *new_messages], tools)
        at = text.find(_SENTINEL) if text is not None else -1
        if text is None or at < 0:
            return None
        stop = self.first_stop(text, at + len(_SENTINEL))
        if stop is None:
            return None
        # Encode with the stop token in front, because some tokenizers treat the beginning of a text differently.
        begin, end = stop
        first, *following = self.encoder.encode(text[begin:])
        return Suffix(first, following) if first == self._stop_ids_by_text[text[begin:end]] else None

    def for_template(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Returns a message in the form that the template writes without loss."""
        return plain


class ChatTemplate(Template):
    """A chat template, with the forms of messages that it writes without loss.

    Args:
        tokenizer: A tokenizer with a chat template.
        encoder: Private copy of the tokenizer.
        stop_token_ids: Ids that end an assistant turn.
        variables: Variables of the template.
        media: Image processor of the model, or the reason why messages cannot contain images.

    Raises:
        ConfigError: If the template accepts no conversation, or omits user messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        encoder: Encoder,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any],
        media: MediaProcessor | str = "the model takes text only",
    ) -> None:
        super().__init__(tokenizer, encoder, stop_token_ids, media)
        self.variables = dict(variables)
        self._convert_text: Callable[[Any], Any] = _as_it_is
        self._convert_arguments: Callable[[Any], Any] = _as_data
        self._without_text: dict[str, Any] = {"content": ""}
        self._find_form_of_text()
        self._find_form_of_calls()

    def _write(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **self.variables
        )
        return text

    def for_template(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Returns a message with text and call arguments in the form that the template writes."""
        if plain.get("content") is None:
            plain["content"] = ""
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_with_arguments(call, self._convert_arguments) for call in plain["tool_calls"]]
            if plain["content"] in ("", []):
                del plain["content"]
                return plain | self._without_text
        plain["content"] = self._convert_text(plain["content"])
        return plain

    def _find_form_of_text(self) -> None:
        """Finds the form of text: some templates accept only strings, those of some vision models only parts."""
        part = [{"type": "text", "text": _SENTINEL}]
        complaint, rendered = "", False
        takes: dict[str, bool] = {}
        for form, content in (("text", _SENTINEL), ("parts", part)):
            takes[form] = False
            for tools in (None, [TOOL]):
                try:
                    text = self.rendered([{"role": "user", "content": content}], tools)
                except ValueError as error:
                    complaint = complaint or str(error)
                else:
                    rendered = True
                    takes[form] = takes[form] or (_SENTINEL in text and "'text'" not in text and '"text"' not in text)
        if not any(takes.values()):
            problem = "it omits user messages" if rendered else complaint
            raise ConfigError(
                f"the chat template of this model cannot be used: {problem}; set chat_template.chat_template_kwargs to "
                "the variables it needs, or put another chat template into the model folder"
            )
        if not takes["text"]:
            self._convert_text = _as_parts
        elif not takes["parts"]:
            self._convert_text = _as_text_only

    def _find_form_of_calls(self) -> None:
        """Finds the form of call arguments (data or text), and of the missing text of a call.

        Templates that join arguments to other text need them as text. Some write calls only if there is no content.
        """
        call = made_up_call("call00001", "made_up", {"key": _SENTINEL})
        result = {"role": "tool", "tool_call_id": "call00001", "name": "made_up", "content": "1"}
        before = self._convert_arguments, {"content": self._convert_text("")}
        absences: tuple[dict[str, Any], ...] = ({"content": self._convert_text("")}, {})
        for rest, without, convert in itertools.product(([], [result]), absences, (_as_data, _as_json)):
            self._convert_arguments, self._without_text = convert, without
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            text = self.rendered_or_none([QUESTION, said, *rest], [TOOL], add_generation_prompt=False)
            if text is not None and _SENTINEL in text and "{'key'" not in text:
                return
        self._convert_arguments, self._without_text = before


class FamilyTemplate(Template):
    """A family of the package, as a template.

    Args:
        tokenizer: Tokenizer of the model.
        encoder: Private copy of the tokenizer.
        family: The package's renderer, created with a `TextTokenizer`.
        pieces: The `TextTokenizer` of ``family``.

    Attributes:
        with_answers: Chat template for conversations with answers, if the family writes these differently.
    """

    what = "the package's renderer"

    def __init__(self, tokenizer: Any, encoder: Encoder, family: Family, pieces: TextTokenizer) -> None:
        super().__init__(tokenizer, encoder, tuple(dict.fromkeys(family.get_stop_token_ids())))
        self.family = family
        self.pieces = pieces
        self.with_answers: ChatTemplate | None = None

    def _write(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        offered = None if tools is None else list(map(_enveloped, tools))
        ids = self.family.render_ids(messages, tools=offered, add_generation_prompt=add_generation_prompt)
        return self.pieces.decode(ids)

    def rendered(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """See `Template.rendered`."""
        if self.with_answers is not None and has_answers(messages):
            return self.with_answers.rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        return super().rendered(messages, tools, add_generation_prompt=add_generation_prompt)

    def for_template(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Returns a message in the form that every family of the package accepts."""
        plain["content"] = _as_text_only(plain.get("content") or "")
        for alias in ("reasoning", "thinking"):
            spelt = plain.pop(alias, None)
            if spelt is not None:
                plain.setdefault("reasoning_content", spelt)
        if plain.get("reasoning_content") is None:
            plain.pop("reasoning_content", None)
        if plain.get("tool_calls"):
            plain["tool_calls"] = [_with_arguments(call, _as_data) for call in plain["tool_calls"]]
        return plain


def _enveloped(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's envelope, the form that models saw in training."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    function = {**function, "arguments": convert(function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _as_it_is(content: Any) -> Any:
    return content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_text_only(content: Any) -> Any:
    """Joins parts to one text.

    Raises:
        ConfigError: If a part is not text.
    """
    return content if isinstance(content, str) else "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"a message contains {kind!r}, but only text is supported here")


def _as_data(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # Pass the text to the template unchanged.
        return arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

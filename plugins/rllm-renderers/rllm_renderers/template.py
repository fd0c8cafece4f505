"""Text in place of tokens: what writes conversations, a model's chat template or a family of the package.

Both write text, which a private `Encoder` makes tokens of in one go. So neither depends on how the pieces of a
conversation are cut, and what they write can be compared letter by letter.
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

_SENTINEL = "sentinel0of0an0answer"
# What templates and families raise on conversations they do not take, on purpose or not.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


class Template(ABC):
    """What writes conversations for one tokenizer.

    The tokenizer only renders; text becomes ids and ids become text in a private `Encoder`, so that nobody who
    truncates or pads with the tokenizer reaches a prompt.

    Args:
        tokenizer: The model's.
        encoder: Its private copy.
        stop_token_ids: Ids that end an assistant's turn.
        media: The model's images, or why messages cannot hold any.
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
        self.media, self._why_no_media = (None, media) if isinstance(media, str) else (media, "")
        if self.media is not None:
            self.media.check_placeholder(self.encoder.control_tokens)

    @abstractmethod
    def _write(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The text of protected messages; raises one of `_REFUSALS` if they are not taken."""

    def text(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation as the model reads it; raises what `rendered` raises."""
        return self.encoder.unmark(self.rendered(messages, tools, add_generation_prompt=add_generation_prompt))

    def rendered(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The rendered conversation for `Encoder.encode`.

        Raises:
            ConfigError: If a message holds what the model does not take.
            RefusedConversation: If the conversation is not taken.
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
        except _REFUSALS as error:
            if any(type(one) is SampledMessage and one.completions for one in messages):
                # Some templates refuse control tokens that a model left in its content; they are text then.
                as_text = [SampledMessage(one, ()) if type(one) is SampledMessage else one for one in messages]
                return self.rendered(as_text, tools, add_generation_prompt=add_generation_prompt)
            reason = " ".join((str(error) or type(error).__name__).split())
            raise RefusedConversation(f"{self.what} does not accept this conversation: {reason}") from error
        return text if self.media is None else self.media.expanded(text, images_of(messages))

    def resolved(self, messages: Sequence[MessageLike]) -> Sequence[MessageLike]:
        """Messages with their images read, see `MediaProcessor.resolve`.

        Raises:
            ConfigError: If there are any, but the model or this installation takes text only.
        """
        for one in messages:
            if not isinstance(one, Mapping):
                message(one)  # which says what is wrong with it
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
        """The rendered conversation for `Encoder.encode`, or None if it is refused."""
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
        text = self.rendered_or_none([*made_up_history(new_messages, called), *new_messages], tools)
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

    def for_template(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A message in the form that is written without loss."""
        return plain


class ChatTemplate(Template):
    """A tokenizer with its chat template, and the forms in which that writes messages without loss.

    Args:
        tokenizer: A tokenizer with a chat template.
        encoder: Its private copy.
        stop_token_ids: Ids that end an assistant's turn.
        variables: Variables of the template.
        media: The model's images, or why messages cannot hold any.

    Raises:
        ConfigError: If the template takes no conversation, or does not write what a user says.
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
        """A message with its text and its calls' arguments in the form that the template writes."""
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
        """Some templates write text only, those of some vision models only text that comes in parts."""
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
        """Whether arguments are data or text, and what stands for the text that a call comes without.

        Templates that join arguments to other text take them as text; some write calls only where there is no content.
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
    """One of the package's families, as what writes text.

    Args:
        tokenizer: The model's.
        encoder: Its private copy.
        family: The package's renderer, made with a `TextTokenizer`.
        pieces: That tokenizer.

    Attributes:
        with_answers: What writes conversations that have answers, if the family writes these otherwise.
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
        writer = super() if self.with_answers is None or not has_answers(messages) else self.with_answers
        return writer.rendered(messages, tools, add_generation_prompt=add_generation_prompt)

    def for_template(self, plain: dict[str, Any]) -> dict[str, Any]:
        """A message as every family of the package takes it."""
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
    """A tool in OpenAI's envelope, which is what models saw in training."""
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
    """Parts as one text.

    Raises:
        ConfigError: If one of them is none.
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
    except (ValueError, RecursionError):  # the template gets the text as it is
        return arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

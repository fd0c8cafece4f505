"""Expected tokens of a conversation from a model folder's template and tokenizer, without code of this repository.

transformers renders the template, and the package ``tokenizers`` encodes the result. If a text of a user, tool or model
spells a control token, a placeholder word replaces the spelling while the template is rendered. So only the template's
own control tokens become control tokens.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import lru_cache
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Items = tuple[str | int, ...]
"""Tokens as alternating text and control tokens, which do not depend on the tokenization of text."""

SENTINEL = "sentinel{}of0an0answer"
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Forecast for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["city"],
        },
    },
}
NAME = "get_weather"

_STAND_IN = re.compile(r"Qz7control(\d+)zQ")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Context in which templates that write the time always write the same one, so that renderings are comparable."""
    from transformers.utils import chat_template_utils

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return now.astimezone(tz) if tz is not None else now

    now, running = datetime.now(), chat_template_utils.datetime
    chat_template_utils.datetime = Stopped
    try:
        yield
    finally:
        chat_template_utils.datetime = running


class Rejected(Exception):
    """The template rejects a conversation; the message is one line."""


@dataclass(frozen=True)
class Written:
    """A conversation as the template writes it.

    Attributes:
        text: Text, without placeholders.
        items: Text and control tokens, see `Items`.
        token_ids: Token ids; None if placeholders leave the choice of tokens open.
    """

    text: str
    items: Items
    token_ids: tuple[int, ...] | None


class Reference:
    """The template and the tokenizer of a model folder.

    Args:
        folder: Folder with ``tokenizer.json``, ``tokenizer_config.json`` and optionally ``chat_template.jinja``.

    Attributes:
        source: Source of the template, or of all templates.
        control: Ids of control tokens by text; other text must not become these tokens.
        parts: Whether the template prints a user's text only as a list of parts.
        text_arguments: Whether the template needs call arguments as JSON text.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _tokenizer(folder)
        self._templates, self._variables = _templates(folder)
        self.source = "\n".join(self._templates.values())
        added = self._tokenizer.get_added_tokens_decoder()
        self.control = {
            token.content: number
            for number, token in added.items()
            if (token.special or re.fullmatch(r"[<\[].*[>\]]", token.content)) and not _BYTE.fullmatch(token.content)
        }
        self._control_ids = frozenset(self.control.values())
        self._spellings = list(self.control)
        self._numbers = {spelling: number for number, spelling in enumerate(self._spellings)}
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rendered: dict[str, str | Rejected] = {}  # shared by both parsers
        self.parts = False
        self.text_arguments = False
        self.parts = not self._prints_user("plain") and self._prints_user("plain", parts=True)
        self.text_arguments = self._wants_text_arguments()

    # Rendering

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None, *, prompt: bool = True) -> str:
        """Renders a conversation.

        Raises:
            Rejected: If the template rejects it.
        """
        plain = [self._in_form(message) for message in messages]
        key = json.dumps([plain, list(tools or ()), prompt], default=dict)
        if key not in self._rendered:
            try:
                self._rendered[key] = self._render(plain, tools, prompt)
            except Rejected as rejection:
                self._rendered[key] = rejection
        found = self._rendered[key]
        if isinstance(found, Rejected):
            raise found
        return found

    def _render(self, plain: list[Message], tools: Tools, prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise Rejected(f"there is no template {name!r}")
        try:
            texts: Any = render_jinja_template(
                conversations=[plain],
                tools=[copy.deepcopy(dict(tool)) for tool in tools] if tools else None,
                chat_template=self._templates[name],
                add_generation_prompt=prompt,
                **self._variables,
            )[0]
        except Exception as error:  # templates may raise any exception
            raise Rejected(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        return str(texts[0])

    def text_or_none(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None, **options: Any) -> str | None:
        """See `text`; None if the template rejects the conversation."""
        try:
            return self.text(messages, tools, **options)
        except Rejected:
            return None

    def written(self, text: str) -> Written:
        """Converts rendered text to `Written`."""
        return Written(
            self.unprotect(text), self.items_of_text(text), None if _STAND_IN.search(text) else tuple(self.encode(text))
        )

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = None, sampled: Mapping[int, Set[str]] | None = None
    ) -> list[Written]:
        """Returns all correct renderings of a conversation with a prompt for the next answer.

        There may be several. Missing content may be printed as none or as empty text, and JSON text has two spellings.
        Sampled control tokens that were parsed as text may become control tokens again, or not.

        Args:
            messages: The conversation.
            tools: Offered tools.
            sampled: Control tokens that the model sampled, by the position of its answer.

        Raises:
            Rejected: If the template rejects the conversation.
        """
        protected = [self.protect(message) for message in messages]
        empty = [_with_empty_content(message) for message in protected]
        as_sampled = sampled or {}
        # A spelling that is text in one answer may be text in all: answers are not linked to their completions.
        texts_somewhere = {
            spelling
            for at, own in as_sampled.items()
            if at < len(messages)
            for spelling in self._control_pattern.findall(json.dumps(messages[at], default=dict, ensure_ascii=False))
            if spelling not in own
        }
        nowhere_text = {at: own - texts_somewhere for at, own in as_sampled.items()}
        kept, agreed = (
            [
                _with_empty_content(self.protect(message, keep.get(at, frozenset())))
                for at, message in enumerate(messages)
            ]
            for keep in (as_sampled, nowhere_text)
        )
        forms = [empty, [_with_plain_arguments(message) for message in empty], kept, agreed, protected]
        texts = [text for form in forms if (text := self.text_or_none(form, tools)) is not None]
        if not texts:
            self.text(empty, tools)  # raises with the reason
        return [self.written(text) for text in dict.fromkeys(texts)]

    def protect(self, message: Mapping[str, Any], keep: Set[str] = frozenset()) -> Message:
        """Replaces spelled control tokens, except those in ``keep``; system text is trusted and stays unchanged."""
        if message.get("role") == "system":
            return dict(message)

        def change(text: str) -> str:
            return self._control_pattern.sub(
                lambda found: found[0] if found[0] in keep else f"Qz7control{self._numbers[found[0]]}zQ", text
            )

        return {key: value if key == "role" else self._map(value, change) for key, value in message.items()}

    def unprotect(self, text: str) -> str:
        """Replaces placeholders with their spellings."""
        return _STAND_IN.sub(lambda found: self._spellings[int(found[1])], text)

    def between_controls(self, text: str) -> list[str]:
        """Splits a text at its spellings of control tokens."""
        return self._control_pattern.split(text)

    def _map(self, value: Any, change: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {key: self._map(item, change) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._map(item, change) for item in value]
        return value

    def _in_form(self, message: Mapping[str, Any]) -> Message:
        """Converts a message to the form that the template prints."""
        plain: Message = self._map(dict(message), str)
        if self.parts and isinstance(plain.get("content"), str):
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        for call in plain.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            if self.text_arguments and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif not self.text_arguments and isinstance(arguments, str):
                function["arguments"] = json.loads(arguments)
        return plain

    def _prints_user(self, text: str, *, parts: bool = False) -> bool:
        content: Any = [{"type": "text", "text": text}] if parts else text
        rendered = self.text_or_none([{"role": "user", "content": content}])
        return rendered is not None and text in rendered

    def _wants_text_arguments(self) -> bool:
        function = {"name": NAME, "arguments": {"city": "Rome"}}
        call = {"id": "call00001", "type": "function", "function": function}
        question = {"role": "user", "content": "plain"}
        messages: list[Message] = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        from_data = self.text_or_none(messages, [TOOL], prompt=False)
        if from_data is not None and "{'city': 'Rome'}" not in from_data:
            return False
        self.text_arguments = True
        return self.text_or_none(messages, [TOOL], prompt=False) is not None

    # Tokens

    def token(self, number: int) -> str:
        """Returns the text of a token id."""
        return str(self._tokenizer.id_to_token(number))

    def number(self, token: str) -> int:
        """Returns the id of a token."""
        return int(self._tokenizer.token_to_id(token))

    def encode(self, text: str) -> list[int]:
        """Encodes rendered text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes tokens, including special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def ordinary(self, text: str) -> list[int]:
        """Encodes text without control tokens, even if it spells them."""
        ids: list[int] = []
        position = 0
        for found in self._control_pattern.finditer(text):
            ids += self.encode(text[position : found.start()])
            ids += [token for character in found[0] for token in self.encode(character)]
            position = found.end()
        return ids + self.encode(text[position:])

    def respelled(self, text: str) -> list[int]:
        """Encodes text differently than the tokenizer: in pieces of three characters, except control tokens."""
        ids: list[int] = []
        position = 0
        for found in self._control_pattern.finditer(text):
            ids += self._in_pieces(text[position : found.start()])
            ids.append(self.control[found[0]])
            position = found.end()
        return ids + self._in_pieces(text[position:])

    def _in_pieces(self, text: str) -> list[int]:
        return [token for at in range(0, len(text), 3) for token in self.encode(text[at : at + 3])]

    def items(self, ids: Sequence[int]) -> Items:
        """Converts tokens to alternating text and control tokens."""
        items: list[str | int] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is None or token in self._control_ids:
                if run:
                    items.append(self.decode(run))
                    run = []
                if token is not None:
                    items.append(token)
            else:
                run.append(token)
        return tuple(items)

    def items_of_text(self, text: str) -> Items:
        """Converts rendered text to `Items`, with placeholders replaced by their text."""
        items: list[str | int] = []
        position = 0
        for found in [*_STAND_IN.finditer(text), None]:
            end = len(text) if found is None else found.start()
            pieces: list[str | int] = [*self.items(self.encode(text[position:end]))] if end > position else []
            if found is not None:
                pieces.append(self._spellings[int(found[1])])
                position = found.end()
            for piece in pieces:
                if items and isinstance(items[-1], str) and isinstance(piece, str):
                    items[-1] += piece
                else:
                    items.append(piece)
        return tuple(items)

    def controls(self, ids: Sequence[int]) -> Counter[int]:
        """Counts each control token in ``ids``."""
        return Counter(token for token in ids if token in self._control_ids)


def sentinel_answer(answer: Mapping[str, Any], number: int) -> Message:
    """Returns an answer with a placeholder word as its text and as the argument of its calls."""
    word = SENTINEL.format(number)
    told: Message = {"role": "assistant", "content": word}
    if answer.get("tool_calls"):
        told["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": {"city": word}},
            }
            for call in answer["tool_calls"]
        ]
    return told


def _with_empty_content(message: Message) -> Message:
    return {**message, "content": ""} if message.get("content") is None else message


def _with_plain_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(list(message["tool_calls"]))
    for call in calls:
        if isinstance(call["function"]["arguments"], str):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}


# --------------------------------------------------------------------------------------------------------------------
# The files of a model folder


def _tokenizer(folder: Path) -> Any:
    """Returns the folder's tokenizer; folders with equal files share one."""
    data = (folder / "tokenizer.json").read_bytes()
    return _tokenizer_of(hashlib.sha256(data).digest(), folder / "tokenizer.json")


@lru_cache(maxsize=2)
def _tokenizer_of(_digest: bytes, path: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _templates(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the templates by name, and their variables: the special tokens."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    variables: dict[str, Any] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            variables[key] = text
    templates: dict[str, str] = {}
    written = config.get("chat_template")
    if isinstance(written, str):
        templates["default"] = written
    elif isinstance(written, list):
        templates = {entry["name"]: entry["template"] for entry in written}
    elif isinstance(written, dict):
        templates = dict(written)
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates = {"default": single.read_text(encoding="utf-8")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    return templates, variables

"""Text to token ids and back, by a private tokenizer, and text from outside that spells control tokens.

Whatever a user or a tool wrote is text. If it spells ``<|im_end|>``, a tokenizer would make the control token of it:
a tool's result could end its turn and speak as the system. So before a template is rendered, such spellings are
replaced by markers (characters of a private-use plane) that come out of the tokenizer as ids of their own, and these
are replaced by the ordinary tokens that spell the same text. The model reads what was written, letter by letter.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer

from rllm_core.errors import ConfigError
from rllm_core.types import MessageLike

ControlTokens = Literal["neutralise", "raw"]

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
"""Whose text may write control tokens: the workflow's author explains formats, examples of answers use them."""

_FIRST_MARKER = 0x10F000
_ESCAPE = "\U0010fffd"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Encoder:
    """A private copy of a tokenizer, without truncation and padding; safe for threads and picklable.

    Args:
        tokenizer: A fast tokenizer of transformers. What others do to it afterwards has no effect here.
        control_tokens: ``neutralise`` or ``raw``.

    Raises:
        ConfigError: If it is not a fast tokenizer.

    Attributes:
        control_tokens: Ids by text of what text from outside must not become.
    """

    def __init__(self, tokenizer: Any, control_tokens: ControlTokens = "neutralise") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"{type(tokenizer).__name__} is not a fast tokenizer (one with a tokenizer.json)")
        self._neutralises = control_tokens == "neutralise"
        self._setup(backend.to_str())

    def _setup(self, serialised: str) -> None:
        self._serialised = serialised
        self._tokenizer = Tokenizer.from_str(serialised)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known_ids = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.control_tokens = {
            added.content: token
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special or re.fullmatch(r"<.+>", added.content)
        }
        spellings = sorted(self.control_tokens, key=len, reverse=True)
        self._markers = {spelling: chr(_FIRST_MARKER + index) for index, spelling in enumerate(spellings)}
        self._control_pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        reserved = [*self._markers.values(), _ESCAPE]
        self._reserved_pattern = re.compile(f"[{''.join(reserved)}]")
        self._protected_pattern = re.compile(f"{self._control_pattern.pattern}|{self._reserved_pattern.pattern}")
        plain = self._without_added_tokens()
        forbidden = frozenset(self.control_tokens.values())
        spell = partial(_ordinary_ids, plain, forbidden)
        self._spelt = {marker: spell(spelling) for spelling, marker in self._markers.items()}
        self._literal = {character: spell(character) for character in reserved}
        with_markers = Tokenizer.from_str(serialised)
        with_markers.no_truncation()
        with_markers.no_padding()
        with_markers.add_special_tokens([AddedToken(character, normalized=False) for character in reserved])
        self._with_markers = with_markers
        self._reserved_ids = {with_markers.token_to_id(character): character for character in reserved}

    def __getstate__(self) -> tuple[str, bool]:
        return self._serialised, self._neutralises

    def __setstate__(self, state: tuple[str, bool]) -> None:
        serialised, self._neutralises = state
        self._setup(serialised)

    def _without_added_tokens(self) -> Tokenizer:
        description = json.loads(self._serialised)
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        return Tokenizer.from_str(json.dumps(description))

    def count(self, messages: Iterable[MessageLike]) -> int:
        """How often text of messages from outside spells a control token."""
        return sum(
            len(self._control_pattern.findall(text))
            for message in messages
            if message.get("role") not in TRUSTED_ROLES
            for text in _texts(message)
        )

    def protect(self, messages: Iterable[MessageLike]) -> list[dict[str, Any]]:
        """Messages to be rendered, with spellings of control tokens in text from outside marked for `encode`."""
        if not self._neutralises:
            return [dict(message) for message in messages]
        return [self._protected(message) for message in messages]

    def _protected(self, message: MessageLike) -> dict[str, Any]:
        if message.get("role") in TRUSTED_ROLES:
            return dict(message)
        return {key: self._marked(value) if key in _TEXT_KEYS else value for key, value in message.items()}

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._protected_pattern.sub(self._marker, value)
        if isinstance(value, list | tuple):
            return [
                {**part, "text": self._marked(part["text"])} if isinstance(part, Mapping) and "text" in part else part
                for part in value
            ]
        return value

    def _marker(self, match: re.Match[str]) -> str:
        return self._markers.get(match[0]) or _ESCAPE + match[0]

    def unmark(self, text: str) -> str:
        """Rendered text as the model will read it."""
        if not self._reserved_pattern.search(text):
            return text
        spellings = {marker: spelling for spelling, marker in self._markers.items()}
        pattern = f"{_ESCAPE}({self._reserved_pattern.pattern})|({self._reserved_pattern.pattern})"
        return re.sub(pattern, lambda found: found[1] or spellings.get(found[2], found[2]), text)

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; control tokens in it are read as such, markers are not, and nothing is added."""
        if not self._neutralises or not self._reserved_pattern.search(text):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        result: list[int] = []
        escaped = False
        for token in self._with_markers.encode(text, add_special_tokens=False).ids:
            character = self._reserved_ids.get(token)
            if character is None:
                result.append(token)
            elif not escaped and character == _ESCAPE:
                escaped = True
                continue
            else:
                result += self._literal[character] if escaped else self._spelt[character]
            escaped = False
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, with nothing left out.

        Special tokens stay visible. So do ids that the tokenizer does not know, since a model's vocabulary may be
        padded beyond its tokenizer's: they show as U+FFFD.
        """
        if not ids or max(ids) < self._known_ids:
            return self._decode_known(ids)
        runs = itertools.groupby(ids, key=lambda token: self._tokenizer.id_to_token(token) is not None)
        return "".join(
            self._decode_known(list(run)) if is_known else _REPLACEMENT * len(list(run)) for is_known, run in runs
        )

    def _decode_known(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


_TEXT_KEYS = ("content", "name", "tool_call_id")


def _texts(message: MessageLike) -> Iterable[str]:
    for key in _TEXT_KEYS:
        value = message.get(key)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            yield from (
                part["text"] for part in value if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            )


def _ordinary_ids(plain: Tokenizer, forbidden: frozenset[int], text: str) -> list[int]:
    """Ids that spell ``text`` in the middle of other text, none of them a control token."""
    anchor = plain.encode("a", add_special_tokens=False).ids
    for pieces in ([text], list(text)):
        ids: list[int] = []
        for piece in pieces:
            whole = plain.encode("a" + piece, add_special_tokens=False).ids
            # Where the anchor merges with the piece, the piece is encoded as if text began with it.
            joins = whole[: len(anchor)] != anchor
            ids += plain.encode(piece, add_special_tokens=False).ids if joins else whole[len(anchor) :]
        if forbidden.isdisjoint(ids):
            return ids
    raise ConfigError(f'the tokenizer has no way to write {text!r} as text; set control_tokens = "raw"')

"""Encodes and decodes text with a private tokenizer, and protects prompts from text that spells control tokens.

Text from users and tools must stay text. If it spells ``<|im_end|>``, a tokenizer would produce the control token: a
tool result could end its turn and speak as the system. Before a template is rendered, such spellings are therefore
replaced by markers, characters of a private-use plane. The tokenizer gives markers their own ids, which are replaced
by the ordinary tokens that spell the same text. The model reads exactly the original characters.

A template that splits messages or writes them as ASCII JSON garbles the markers along with other non-ASCII text. This
is safe, because a garbled marker is not a control token either, but the text is then not exact.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from rllm_core.errors import ConfigError
from rllm_core.types import MessageLike, SampledMessage

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
"""Roles whose text may contain control tokens: the workflow's author explains formats, and example answers use them.

Sampled messages are excluded: they may repeat text of a user, see `SampledMessage`.
"""

# Private-use characters: one for each control token (some families have thousands), one to escape characters of this
# range in messages, and one to separate two pieces of text.
_FIRST_MARKER = 0x100000
_ESCAPE = "\U0010fffd"
_BREAK = "\U0010fffc"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # Byte fallback: ordinary text.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Encoder:
    """A private copy of a tokenizer, without truncation and padding; thread-safe and picklable.

    Args:
        tokenizer: A fast tokenizer of transformers. Later changes to it have no effect here.

    Raises:
        ConfigError: If the tokenizer is not a fast tokenizer.

    Attributes:
        control_tokens: Maps the text of each control token, which untrusted text must not produce, to its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"{type(tokenizer).__name__} is not a fast tokenizer (one with a tokenizer.json)")
        self._setup(backend.to_str())

    def _setup(self, serialised: str) -> None:
        self._serialised = serialised
        self._tokenizer = Tokenizer.from_str(serialised)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known_ids = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._first_hole = next(token for token in itertools.count() if token not in self._known_ids)
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        control = {
            token: added
            for token, added in added_tokens.items()
            if (added.special or re.fullmatch(r"<.+>", added.content)) and not _BYTE.fullmatch(added.content)
        }
        self.control_tokens = {added.content: token for token, added in control.items()}
        self._spelling_by_id = {token: added.content for token, added in control.items()}
        self._control_pattern = re.compile(_one_of(self.control_tokens) or r"(?!)")
        normalised = any(added.normalized for added in control.values())
        self._normaliser = self._tokenizer.normalizer if normalised else None
        spellings = list(self.control_tokens)
        self._markers = {spelling: chr(_FIRST_MARKER + index) for index, spelling in enumerate(spellings)}
        reserved = [*self._markers.values(), _ESCAPE, _BREAK]
        self._reserved_pattern = re.compile(f"[{''.join(reserved)}]")
        self._protected_pattern = re.compile(f"{self._control_pattern.pattern}|{self._reserved_pattern.pattern}")
        plain = _without_added_tokens(self._tokenizer)
        forbidden = frozenset(self.control_tokens.values())
        spelt = {marker: _ordinary_ids(plain, forbidden, spelling) for spelling, marker in self._markers.items()}
        self._ids_by_reserved = {**spelt, _BREAK: []}
        self._tokenizer.add_special_tokens([AddedToken(character, normalized=False) for character in reserved])
        self._reserved_by_id = {self._tokenizer.token_to_id(character): character for character in reserved}
        if not self._known_ids.isdisjoint(self._reserved_by_id):
            raise ConfigError(
                "the tokenizer's vocabulary has gaps, so no tokens can be added to it; use another tokenizer"
            )
        self._plain = plain
        self._break_id = cast("int", self._tokenizer.token_to_id(_BREAK))  # added above

    def __getstate__(self) -> str:
        return self._serialised

    def __setstate__(self, serialised: str) -> None:
        self._setup(serialised)

    def count(self, messages: Iterable[MessageLike]) -> int:
        """Returns how often untrusted text in messages spells a control token."""
        return sum(
            self._spellings(text)
            for message in messages
            if message.get("role") not in TRUSTED_ROLES
            for key, value in message.items()
            if key != "role"
            for text in _texts(value)
        )

    def _spellings(self, text: str) -> int:
        count = len(self._control_pattern.findall(text))
        normalised = self._normalised(text)
        return count if normalised is text else max(count, len(self._control_pattern.findall(normalised)))

    def _normalised(self, text: str) -> str:
        if self._normaliser is None or text.isascii():
            return text
        return str(self._normaliser.normalize_str(text))

    def protect(self, messages: Iterable[MessageLike], *, placeholder: str = "") -> list[dict[str, Any]]:
        """Marks spellings of control tokens in untrusted text of messages, for `encode`.

        Args:
            messages: Messages to render.
            placeholder: A control token that only the template may write, so it is marked in trusted text too.
        """
        protected = []
        for message in messages:
            mark = self.escape if message.get("role") in TRUSTED_ROLES else self._marked
            if isinstance(message, SampledMessage):
                mark = partial(self._marked, but=self._sampled_as_such(message))
            protected.append({key: value if key == "role" else mark(value) for key, value in message.items()})
        if placeholder:
            marker = self._markers[placeholder]
            protected = [map_text(message, lambda text: text.replace(placeholder, marker)) for message in protected]
        return protected

    def escape(self, value: Any) -> Any:
        """Escapes characters that would be markers, in trusted data to render, such as tools."""
        return map_text(value, lambda text: self._reserved_pattern.sub(lambda found: _ESCAPE + found[0], text))

    def _sampled_as_such(self, message: SampledMessage) -> frozenset[str]:
        """Returns the control tokens that a model sampled as such and never spelled with other tokens."""
        sampled: set[str] = set()
        markers: set[str] = set()
        for ids in (list(map(int, completion)) for completion in message.completions):
            sampled |= {self._spelling_by_id[token] for token in ids if token in self._spelling_by_id}
            markers |= set(self._reserved_pattern.findall(self.decode_marked(ids)))
        return frozenset(spelling for spelling in sampled if self._markers[spelling] not in markers)

    def _marked(self, value: Any, but: frozenset[str] = frozenset()) -> Any:
        marked = map_text(value, lambda text: self._marked_text(text, but))
        if isinstance(value, list | tuple):
            pieces = list(_pieces(value))
            # Templates join the parts of a message, so several parts together can spell a token.
            if self._spellings("".join(pieces)) > sum(map(self._spellings, pieces)):
                marked = [_with_break(part) for part in marked]
        return marked

    def _marked_text(self, text: str, but: frozenset[str] = frozenset()) -> str:
        normalised = self._normalised(text)
        if normalised != text and self._spellings(text) > len(self._control_pattern.findall(text)):
            text = normalised
        return self._protected_pattern.sub(
            lambda found: found[0] if found[0] in but else self._markers.get(found[0]) or _ESCAPE + found[0], text
        )

    def unmark(self, text: str) -> str:
        """Returns rendered text as the model will read it."""
        if not self._reserved_pattern.search(text):
            return text
        written = {marker: spelling for spelling, marker in self._markers.items()} | {_BREAK: "", _ESCAPE: ""}
        pattern = f"{_ESCAPE}({self._reserved_pattern.pattern})|({self._reserved_pattern.pattern})"
        return re.sub(pattern, lambda found: found[1] or written[found[2]], text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of rendered text. Control tokens in it become control tokens, markers become text."""
        if not self._reserved_pattern.search(text):
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        result: list[int] = []
        escaped = False
        for token in self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids:
            character = self._reserved_by_id.get(token)
            if character is None:
                result.append(token)
            elif escaped:
                result += _ids_in_text(self._plain, character)
            elif character == _ESCAPE:
                escaped = True
                continue
            else:
                result += self._ids_by_reserved[character]
            escaped = False
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled ids, with nothing omitted.

        Special tokens stay visible. Ids unknown to the tokenizer show as U+FFFD; a model's vocabulary may be padded
        beyond its tokenizer's.
        """
        if not ids or max(ids) < self._first_hole:
            return self._decode_known(ids)
        return self._decode(ids, self._known_ids)

    def decode_marked(self, ids: Sequence[int]) -> str:
        """Decodes ids, with markers where other tokens spell a control token, so that only sampled ones count.

        `unmark` turns the result into the text that a reward function sees.
        """
        text = self.decode(ids)
        if not self._protected_pattern.search(text) and self._normaliser is None:
            return text
        # Decode with breaks in place of sampled control tokens, and insert their spellings afterwards.
        sampled = [self._spelling_by_id[token] for token in ids if token in self._spelling_by_id]
        rest = self._decode(
            [
                self._break_id if token in self._spelling_by_id else -1 if token == self._break_id else token
                for token in ids
            ],
            self._known_ids | {self._break_id},
        )
        pieces = rest.split(_BREAK)
        if len(pieces) != len(sampled) + 1:  # the text itself contains the break character, which is very unlikely
            return self._marked_text(text)
        marked = map(self._marked_text, pieces)
        return "".join(itertools.chain.from_iterable(zip(marked, [*sampled, ""], strict=True)))

    def _decode(self, ids: Sequence[int], known: frozenset[int]) -> str:
        runs = itertools.groupby(ids, key=known.__contains__)
        return "".join(
            self._decode_known(list(run)) if is_known else _REPLACEMENT * len(list(run)) for is_known, run in runs
        )

    def _decode_known(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of JSON-like data with ``change`` applied to each of its texts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_text(key, change): map_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_text(item, change) for item in value]
    return value


def _texts(value: Any) -> Iterable[str]:
    """Yields the texts in the value of a message's key; content in parts counts as one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        yield "".join(_pieces(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)


def _pieces(parts: Iterable[Any]) -> Iterable[str]:
    """Yields the texts of content in parts, without white space that templates may strip."""
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text.strip()


def _with_break(part: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": _with_break(part["text"])}
    if not isinstance(part, str):
        return part
    end = len(part.rstrip())  # Before white space, so that templates can still strip it.
    return part[:end] + _BREAK + part[end:]


def _one_of(words: Iterable[str]) -> str:
    """Returns a pattern for the longest of ``words``; common prefixes are tried once, since there are thousands."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    ends = rests.pop("", None) is not None
    branches = "|".join(re.escape(first) + _one_of(rest) for first, rest in rests.items())
    return f"(?:{branches})" + "?" * ends if branches else ""


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    plain = Tokenizer(tokenizer.model)  # Shared, because a large vocabulary takes seconds to build.
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _ids_in_text(plain: Tokenizer, piece: str) -> list[int]:
    """Returns ids that spell ``piece`` in the middle of other text."""
    anchor = plain.encode("a", add_special_tokens=False).ids
    whole: list[int] = plain.encode("a" + piece, add_special_tokens=False).ids
    # If the anchor merges with the piece, encode the piece as the beginning of a text.
    joins = whole[: len(anchor)] != anchor
    return list(plain.encode(piece, add_special_tokens=False).ids) if joins else whole[len(anchor) :]


def _ordinary_ids(plain: Tokenizer, forbidden: frozenset[int], text: str) -> list[int]:
    """Returns ids that spell ``text`` in the middle of other text, without control tokens."""
    for pieces in ([text], list(text)):
        ids = [token for piece in pieces for token in _ids_in_text(plain, piece)]
        if ids and forbidden.isdisjoint(ids):
            return ids
    raise ConfigError(
        f"the tokenizer cannot encode {text!r} as text, which any prompt may contain; use another tokenizer"
    )

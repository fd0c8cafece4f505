"""Spelling of tokens: the bytes of each, and encoding from text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_core.errors import ConfigError

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL = re.compile(r"<.+>")
_WORD_BEGINNING = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        spellings: Bytes of each token id; None for control tokens and others without known bytes.
        control_ids: Ids of control tokens by name.
        encode: Encodes a text without control tokens. The ids spell exactly the text, except that some tokenizers add
            a space at the start, and after tokens that were added to the vocabulary.
    """

    spellings: Sequence[bytes | None]
    control_ids: Mapping[str, int]
    encode: Callable[[str], list[int]] = field(compare=False)

    def spelling(self, token: int) -> bytes | None:
        """See ``spellings``. Also None for ids of the model that the tokenizer does not have."""
        return self.spellings[token] if token < len(self.spellings) else None


def hugging_face_vocabulary(tokenizer: Any) -> Vocabulary:
    """Returns the vocabulary of a fast tokenizer of transformers.

    Raises:
        ConfigError: If it is not a fast tokenizer, or uses neither byte-level BPE nor SentencePiece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"{type(tokenizer).__name__} is not a fast tokenizer, so the bytes of its tokens are unknown")
    state: dict[str, Any] = json.loads(backend.to_str())
    spell = _speller(state.get("decoder"))
    added = {token["id"]: token for token in state["added_tokens"]}
    is_control = {number: _is_control(token) for number, token in added.items()}
    names: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    spellings: list[bytes | None] = [None] * (max(names.values(), default=-1) + 1)
    for name, number in names.items():
        if number not in added:
            spellings[number] = spell(name)
        elif not is_control[number]:
            spellings[number] = name.encode()
    # Text that spells a control token must stay text, and get no special tokens around it.
    state |= {"post_processor": None, "truncation": None, "padding": None}
    state["added_tokens"] = [token for token in state["added_tokens"] if not is_control[token["id"]]]
    plain = type(backend).from_str(json.dumps(state))
    return Vocabulary(
        tuple(spellings),
        {token["content"]: number for number, token in added.items() if is_control[number]},
        # By name: without the control tokens, other added tokens may have other ids.
        lambda text: [names[token] for token in plain.encode(text, add_special_tokens=False).tokens],
    )


def _is_control(token: Mapping[str, Any]) -> bool:
    text = token["content"]
    return bool(token["special"] or _CONTROL.fullmatch(text)) and not _BYTE_FALLBACK.fullmatch(text)


def _speller(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes | None]:
    """Returns the function from a token's name to its bytes."""
    steps = list(_steps(decoder))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = any(step["type"] == "Replace" and step["content"] == " " for step in steps)
    if "Metaspace" in kinds or ("ByteFallback" in kinds and replaced):
        return _sentence_piece
    raise ConfigError(
        f"cannot determine the bytes of tokens: the tokenizer's decoder is {', '.join(sorted(kinds)) or 'none'}; "
        "supported are byte-level BPE and SentencePiece"
    )


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


def _byte_level(name: str) -> bytes | None:
    try:
        return bytes(_BYTES[character] for character in name)
    except KeyError:
        return None


def _sentence_piece(name: str) -> bytes:
    fallback = _BYTE_FALLBACK.fullmatch(name)
    return bytes([int(fallback[1], 16)]) if fallback else name.replace(_WORD_BEGINNING, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Maps characters of byte-level BPE to bytes: printable bytes stand for themselves, others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()

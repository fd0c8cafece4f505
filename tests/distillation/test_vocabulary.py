"""Tests the bytes of tokens with real tokenizers."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rllm_core.errors import ConfigError
from rllm_core.parser.vocabulary import Vocabulary, hugging_face_vocabulary
from rllm_devkit.scripted import ByteParser


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("\u0120", "a")]
    words = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def sentence_piece() -> Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "\u2581", "\u2581a", "ab"]
    merges = [("\u2581", "a"), ("a", "b")]
    words = {token: index for index, token in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("    ", normalized=False)])
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return hugging_face_vocabulary(SimpleNamespace(backend_tokenizer=tokenizer))


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


@pytest.mark.parametrize(("tokenizer", "before"), [(BYTE_LEVEL, b""), (SENTENCE_PIECE, b" ")])
@given(text=st.one_of(st.text(max_size=12), st.text("ab <>|end cal", max_size=20)))
@example(text="    ")
@example(text="ab    a")
def test_tokens_spell_the_text(tokenizer: Tokenizer, before: bytes, text: str) -> None:
    known = vocabulary(tokenizer)
    spelled = b"".join(known.spelling(token) or b"?" for token in known.encode(text))
    space = b" ?" if before else b""
    added = re.escape(b"    ")
    assert re.fullmatch(space + re.escape(text.encode()).replace(added, added + space), spelled)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
def test_text_that_spells_a_control_token_stays_text(tokenizer: Tokenizer) -> None:
    known = vocabulary(tokenizer)
    assert known.control_ids == {name: tokenizer.token_to_id(name) for name in ("<|end|>", "<call>")}
    for name, token in known.control_ids.items():
        assert tokenizer.encode(name).ids[-1:] == [token]
        assert token not in known.encode(f"x{name}x")
        assert known.spelling(token) is None
    assert known.spelling(tokenizer.token_to_id("    ")) == b"    "
    assert known.spelling(10**6) is None


def test_equal_vocabularies_are_equal_and_others_are_not() -> None:
    assert vocabulary(byte_level()) == vocabulary(BYTE_LEVEL)
    assert vocabulary(BYTE_LEVEL) != vocabulary(SENTENCE_PIECE)
    more = byte_level()
    more.add_special_tokens(["<|more|>"])
    assert vocabulary(more) != vocabulary(BYTE_LEVEL)
    assert ByteParser().vocabulary() == ByteParser().vocabulary()


@pytest.mark.parametrize(
    ("tokenizer", "complaint"),
    [
        (SimpleNamespace(), "SimpleNamespace is not a fast tokenizer"),
        (SimpleNamespace(backend_tokenizer=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), "decoder is none"),
    ],
)
def test_tokens_whose_bytes_are_unknown(tokenizer: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        hugging_face_vocabulary(tokenizer)

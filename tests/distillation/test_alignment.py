"""Tests two tokenizations of one text: chunks end where both do, and no token is lost or invented."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.distillation.alignment import Alignment, align, one_to_one
from rllm_core.parser import Vocabulary
from rllm_core.types import token_ids


def vocabulary(pieces: Sequence[bytes], *controls: str, prefix: bytes = b"") -> Vocabulary:
    """Makes a vocabulary of all bytes, some longer pieces (the longest match wins) and control tokens."""
    spellings: list[bytes | None] = [bytes([byte]) for byte in range(256)] + list(pieces)
    by_length = sorted(range(256, len(spellings)), key=lambda token: -len(spellings[token] or b""))

    def encode(text: str) -> list[int]:
        left, ids = prefix + text.encode() if text else b"", []
        while left:
            token = next((t for t in by_length if left.startswith(spellings[t] or b"\0\0")), left[0])
            ids.append(token)
            left = left[len(spellings[token] or b"") :]
        return ids

    names = {name: len(spellings) + place for place, name in enumerate(controls)}
    return Vocabulary([*spellings, *([None] * len(controls))], names, encode)


PIECES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).map(str.encode), max_size=6)


def plain_chunks(mine: list[bytes], theirs: list[bytes]) -> list[tuple[list[int], list[int]]]:
    """Walks both token lists; a chunk ends whenever both have read equally many bytes."""
    chunks: list[tuple[list[int], list[int]]] = []
    left, right, i, j = 0, 0, 0, 0
    current: tuple[list[int], list[int]] = ([], [])
    while i < len(mine) or j < len(theirs):
        if i < len(mine) and left <= right:
            left += len(mine[i])
            current[0].append(i)
            i += 1
        else:
            right += len(theirs[j])
            current[1].append(j)
            j += 1
        if left == right:
            chunks.append(current)
            current = ([], [])
    return chunks


@given(text=st.text(max_size=30), student=PIECES, teacher=PIECES, seed=st.integers(0, 2**32 - 1))
def test_sums_are_conserved(text: str, student: list[bytes], teacher: list[bytes], seed: int) -> None:
    mine, theirs = vocabulary(student), vocabulary(teacher)
    completion = mine.encode(text)
    alignment = align(token_ids(completion), mine, theirs, {})
    rng = np.random.default_rng(seed)
    p, q = -rng.exponential(size=len(completion)), -rng.exponential(size=len(alignment.teacher_ids))
    advantages, scored = alignment.advantages(p, q)
    assert scored.all()
    assert b"".join(theirs.spellings[token] or b"" for token in alignment.teacher_ids) == text.encode()
    assert float(advantages.sum(dtype=np.float64)) == pytest.approx(q.sum() - p.sum(), abs=1e-4)
    spelt = [
        [v.spellings[token] or b"" for token in ids] for v, ids in ((mine, completion), (theirs, alignment.teacher_ids))
    ]
    for ours, other in plain_chunks(*spelt):
        part = advantages[ours]
        assert np.ptp(part) == 0
        assert part.sum(dtype=np.float64) == pytest.approx(q[other].sum() - p[ours].sum(), abs=1e-4)


@given(data=st.binary(max_size=20), student=PIECES, teacher=PIECES)
def test_from_the_first_byte_that_is_no_text_nothing_is_scored(
    data: bytes, student: list[bytes], teacher: list[bytes]
) -> None:
    mine, theirs = vocabulary(student), vocabulary(teacher)
    alignment = align(token_ids(list(data)), mine, theirs, {})
    valid = len(data)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        valid = error.start
    assert b"".join(theirs.spellings[token] or b"" for token in alignment.teacher_ids) == data[:valid]
    assert not (alignment.chunk_of[valid:] >= 0).any()
    assert (alignment.chunk_of[:valid] >= 0).all() or not valid


def test_control_tokens_stand_for_their_namesakes() -> None:
    mine, theirs = vocabulary([b"ab"], "<think>", "<only mine>", "<eos>"), vocabulary([], "<end>", "<think>")
    think, only, eos = (mine.control_ids[name] for name in ("<think>", "<only mine>", "<eos>"))
    completion = [think, 256, only, ord("c"), eos]
    alignment = align(token_ids(completion), mine, theirs, {eos: theirs.control_ids["<end>"]})
    assert alignment.teacher_ids == [theirs.control_ids["<think>"], *b"abc", theirs.control_ids["<end>"]]
    advantages, scored = alignment.advantages(np.full(5, -1.0), np.array([-5.0, -2.0, -1.0, -4.0, -0.5]))
    assert scored.tolist() == [True, True, False, True, True]
    assert advantages.tolist() == [-4.0, -2.0, 0.0, -3.0, 0.5]


def test_a_space_that_a_tokenizer_puts_in_front_is_not_the_text() -> None:
    spaced = vocabulary([b" ab"], prefix=b" ")
    alignment = align(token_ids(list(b"abc")), vocabulary([]), spaced, {})
    assert len(alignment.teacher_ids) == 2
    assert alignment.chunk_of.tolist() == [0, 0, 1]


def test_a_tokenizer_that_changes_the_text_scores_nothing() -> None:
    lossy = vocabulary([])
    lossy = Vocabulary(lossy.spellings, {}, lambda text: list(text.lower().encode()))
    assert align(token_ids(list(b"ab")), lossy, lossy, {}).chunk_of.tolist() == [0, 1]
    assert align(token_ids(list(b"aB")), lossy, lossy, {}).chunk_of.tolist() == [-1, -1]


def test_a_token_that_the_teacher_cannot_score_leaves_its_chunk_unscored() -> None:
    alignment = align(token_ids(list(b"abcd")), vocabulary([]), vocabulary([b"ab"]), {})
    for unknown in (np.nan, -np.inf):
        advantages, scored = alignment.advantages(np.full(4, -1.0), np.array([-0.5, unknown, -3.0]))
        assert scored.tolist() == [True, True, False, True]
        assert advantages.tolist() == [0.75, 0.75, 0.0, -2.0]


def test_one_vocabulary_is_compared_token_by_token() -> None:
    alignment = one_to_one(token_ids([7, 8, 9]))
    advantages, scored = alignment.advantages(np.array([-1.0, -2.0, -3.0]), np.array([-0.5, np.nan, -4.0]))
    assert advantages.tolist() == [0.5, 0.0, -1.0]
    assert scored.tolist() == [True, False, True]
    assert isinstance(alignment, Alignment)

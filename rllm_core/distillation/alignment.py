"""Aligns two tokenizations of one text by bytes.

A chunk ends where both tokenizations have a token boundary at the same byte. The models can then be compared chunk by
chunk: a chunk's log-probability under a model is the sum over that model's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rllm_core.parser.vocabulary import Vocabulary
from rllm_core.types import TokenIds

UNSCORED = -1


@dataclass(frozen=True, eq=False)
class Alignment:
    """A completion in the student's and in the teacher's tokens.

    Attributes:
        teacher_ids: ``(teacher_tokens,)`` the completion in the teacher's tokens.
        chunk_of: ``(student_tokens,)`` chunk of each student token, or `UNSCORED`.
        teacher_chunk_of: ``(teacher_tokens,)`` chunk of each teacher token, or `UNSCORED`.
        chunks: Number of chunks.
    """

    teacher_ids: list[int]
    chunk_of: npt.NDArray[np.int64]
    teacher_chunk_of: npt.NDArray[np.int64]
    chunks: int

    def advantages(
        self, student_logprobs: npt.NDArray[np.floating], teacher_logprobs: npt.NDArray[np.floating]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Spreads teacher minus student log-probability of each chunk evenly over the student's tokens.

        Args:
            student_logprobs: ``(student_tokens,)`` log-probabilities.
            teacher_logprobs: ``(teacher_tokens,)`` log-probabilities; a non-finite one leaves its chunk unscored.

        Returns:
            ``(student_tokens,)`` advantages, 0 where unscored, and a ``(student_tokens,)`` mask of scored tokens.
        """
        covered, theirs = self.chunk_of >= 0, self.teacher_chunk_of >= 0
        chunk, teacher_chunk = self.chunk_of[covered], self.teacher_chunk_of[theirs]
        teacher = np.asarray(teacher_logprobs, np.float64)[theirs]
        is_known = np.isfinite(teacher)
        unknown = np.bincount(teacher_chunk[~is_known], minlength=self.chunks) > 0
        difference = np.bincount(teacher_chunk, np.where(is_known, teacher, 0.0), self.chunks)
        difference -= np.bincount(chunk, np.asarray(student_logprobs, np.float64)[covered], self.chunks)
        tokens = np.bincount(chunk, minlength=self.chunks)
        advantages = np.zeros(len(self.chunk_of), np.float32)
        scored = np.zeros(len(self.chunk_of), np.bool_)
        scored[covered] = ~unknown[chunk]
        advantages[scored] = (difference / np.maximum(tokens, 1))[self.chunk_of[scored]]
        return advantages, scored


def one_to_one(tokens: TokenIds) -> Alignment:
    """Aligns two models with the same vocabulary: every token is a chunk."""
    chunks = np.arange(len(tokens))
    return Alignment(tokens.tolist(), chunks, chunks, len(tokens))


def align(completion_ids: TokenIds, student: Vocabulary, teacher: Vocabulary, stops: Mapping[int, int]) -> Alignment:
    """Aligns a student's completion with the teacher's tokens.

    Control tokens map to the teacher's control tokens of the same name, and stop tokens to the teacher's stop token.
    Other control tokens are omitted from the teacher's tokens. Nothing is scored after the first byte that is not valid
    UTF-8. ``stops`` has the teacher's stop token for each of the student's.
    """
    names = {number: name for name, number in student.control_ids.items()}
    builder = _Builder(teacher)
    text: list[tuple[int, bytes]] = []
    for position, token in enumerate(completion_ids.tolist()):
        spelling = student.spelling(token)
        if spelling is not None and token not in stops:
            text.append((position, spelling))
            continue
        if not builder.add_text(text):
            break
        text = []
        twin = stops.get(token, teacher.control_ids.get(names.get(token, "")))
        if twin is not None:
            builder.add_control(position, twin)
    else:
        builder.add_text(text)
    return builder.alignment(len(completion_ids))


class _Builder:
    """Builds an alignment step by step."""

    def __init__(self, teacher: Vocabulary) -> None:
        self._teacher = teacher
        self._ids: list[int] = []
        self._teacher_chunks: list[int] = []
        self._chunks: dict[int, int] = {}
        self._count = 0

    def add_control(self, position: int, twin: int) -> None:
        """Adds a control token, as its own chunk."""
        self._chunks[position] = self._count
        self._ids.append(twin)
        self._teacher_chunks.append(self._count)
        self._count += 1

    def add_text(self, tokens: Sequence[tuple[int, bytes]]) -> bool:
        """Adds consecutive tokens with their positions; returns False if some cannot be aligned."""
        spelt = b"".join(spelling for _, spelling in tokens)
        text = _valid_beginning(spelt)
        ids = self._teacher.encode(text)
        spellings = self._spelt(ids, text.encode())
        if spellings is None:
            return False
        ends = np.cumsum([len(spelling) for spelling in spellings], dtype=np.int64)
        mine = np.cumsum([len(spelling) for _, spelling in tokens], dtype=np.int64)
        common = np.intersect1d(mine, ends)
        chunks, theirs = np.searchsorted(common, mine), np.searchsorted(common, ends)
        for (position, _), chunk in zip(tokens, chunks.tolist(), strict=True):
            if chunk < len(common):
                self._chunks[position] = self._count + chunk
        self._ids += ids
        self._teacher_chunks += [self._count + c if c < len(common) else UNSCORED for c in theirs.tolist()]
        self._count += len(common)
        return len(text.encode()) == len(spelt)

    def _spelt(self, ids: Sequence[int], wanted: bytes) -> list[bytes] | None:
        """Returns the bytes of each teacher token, or None if together they differ from the text."""
        spellings = [self._teacher.spelling(token) for token in ids]
        known = [spelling for spelling in spellings if spelling is not None]
        if len(known) < len(spellings):
            return None
        whole = b"".join(known)
        if whole == b" " + wanted and known:  # SentencePiece prepends a space
            known[0], whole = known[0][1:], wanted
        return known if whole == wanted else None

    def alignment(self, tokens: int) -> Alignment:
        """Returns the alignment for a completion with this number of tokens."""
        chunk_of = np.full(tokens, UNSCORED, np.int64)
        for position, chunk in self._chunks.items():
            chunk_of[position] = chunk
        return Alignment(self._ids, chunk_of, np.array(self._teacher_chunks, np.int64), self._count)


def _valid_beginning(text: bytes) -> str:
    """Returns the longest prefix that is valid UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()

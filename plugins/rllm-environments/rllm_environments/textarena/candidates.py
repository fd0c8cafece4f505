"""Guesses legal moves from the texts that a player was shown. Few games list their moves, so copies test them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

_BRACKETED = re.compile(r"\[([^\[\]\n]{1,80})\]")
_LISTED = re.compile(
    r"(?:available|valid|legal|possible|allowed|your)\s+(?:moves?|actions?|options?|commands?|columns?|pits?|cells?)"
    r"[^\[\n]{0,40}?[:\n]?((?:[^\[\n]{0,40}\[[^\[\]\n]{1,40}\])+)",
    re.IGNORECASE,
)
_SPEAKERS = re.compile(r"(GAME|Player(?: -?\d+)?|Player \w|Moderator)$")
_PLACEHOLDER = re.compile(
    r"<[^<>]{1,30}>|\{[^{}]{1,30}\}|\b(?:row|col|column|x|y|n|m|number|position|pos|source|target|from|to|cell|square|index|i|j"
    r"|amount|bid|value|card|pile|quantity|face|r|c|row1|col1|row2|col2|r1|c1|r2|c2|X|Y|N)\b"
)
_NUMBER = re.compile(r"\d+")
_SQUARE = re.compile(r"(?<![a-zA-Z])[a-zA-Z]\d{1,2}(?!\d)")
_LETTER = re.compile(r"\b[A-Za-z]\b")

FREE_TEXTS = ("I pass for now.", "[pass]", "[skip]", "[done]", "[accept]", "[deny]", "[check]", "[fold]")


def listed(texts: Sequence[str]) -> list[str]:
    """Returns the moves listed in the newest text that lists any."""
    for text in reversed(texts):
        found = [move for part in _LISTED.findall(text) for move in _bracketed(part)]
        if found:
            return list(dict.fromkeys(found))
    return []


def candidates(texts: Sequence[str], rng: random.Random, tries: int) -> Iterator[str]:
    """Yields possibly legal moves: forms from the texts with other numbers and letters, and free text.

    Args:
        texts: Texts that the player was shown, oldest first.
        rng: Source of all random choices.
        tries: Number of moves with other numbers to try.
    """
    named = list(dict.fromkeys(move for text in reversed(texts) for move in _bracketed(text)))
    rng.shuffle(named)
    numbers = sorted({int(number) for text in texts for number in _NUMBER.findall(text) if len(number) < 5})
    forms = [form for form in named if _NUMBER.search(form) or _LETTER.search(form) or _PLACEHOLDER.search(form)]
    yield from named
    for number in range(tries):
        if number == 2 * len(FREE_TEXTS):
            yield from FREE_TEXTS
        if forms:
            yield _varied(rng.choice(forms), numbers, rng)
        else:
            yield f"[{_some_number(numbers, rng)}]"
    yield from FREE_TEXTS


def _bracketed(text: str) -> list[str]:
    return [f"[{inner}]" for inner in _BRACKETED.findall(text) if not _SPEAKERS.fullmatch(inner.strip())]


def _varied(form: str, numbers: Sequence[int], rng: random.Random) -> str:
    if _SQUARE.search(form):
        return _SQUARE.sub(lambda found: _square(found[0], rng), form)
    if not _NUMBER.search(form):
        form = _PLACEHOLDER.sub(lambda _: str(_some_number(numbers, rng)), form)
    varied = _NUMBER.sub(lambda _: str(_some_number(numbers, rng)), form)
    return _LETTER.sub(lambda found: _letter(found[0], rng), varied)


def _some_number(numbers: Sequence[int], rng: random.Random) -> int:
    return rng.choice(numbers) if numbers and rng.random() < 0.2 else rng.randrange(rng.choice((3, 5, 9, 12)))


def _square(like: str, rng: random.Random) -> str:
    return f"{_letter(like[0], rng)}{rng.randint(0, 8)}"


def _letter(like: str, rng: random.Random) -> str:
    letter = rng.choice("abcdefgh")
    return letter.upper() if like.isupper() else letter

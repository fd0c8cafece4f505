"""Code and text of others: what they may do to this process and to the terminal."""

from __future__ import annotations

MAX_TEXT_CHARACTERS = 1_000


def printable(text: str) -> str:
    """``text`` in one line of bounded length, without anything that would control a terminal."""
    cut = text[:MAX_TEXT_CHARACTERS]
    line = " ".join("".join(character if character.isprintable() else " " for character in cut).split())
    return f"{line} ... ({len(text):,} characters)" if len(text) > len(cut) else line

"""Extracts the action from a model's answer."""

from __future__ import annotations

_OPEN, _CLOSE = "<answer>", "</answer>"


def action_of(text: str) -> str:
    """Returns the content of the last ``<answer> </answer>``, or the whole text without such a tag; stripped."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return (text[start + len(_OPEN) : end] if start >= 0 else text).strip()

"""Checks of the arguments that workflows pass to completers: a wrong one would look like an error of the engine."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.parser import ToolSpec


def checked_count(name: str, value: Any) -> int:
    """Returns an argument as an integer.

    Raises:
        ValueError: If it is not an integer, or less than 1.
    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name} must be an integer and at least 1, got {value!r:.80}")
    return count


def checked_stop_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts as a tuple.

    Raises:
        ValueError: If ``texts`` is not a sequence of texts, or one of them is empty.
    """
    if not _is_list(texts) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop_texts must be a list of texts that are not empty, got {texts!r:.80}")
    return tuple(texts)


def check_tool_specs(tools: Sequence[ToolSpec] | None) -> None:
    """Checks the form of tools, but not their content, which depends on the chat template.

    Raises:
        ValueError: If they are not a list of dictionaries.
    """
    if tools is None or (_is_list(tools) and all(map(_is_tool, tools))):
        return
    raise ValueError(f"tools must be a list of dictionaries that describe tools, such as {_EXAMPLE}, got {tools!r:.80}")


_EXAMPLE = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _is_tool(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("function", value), Mapping)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

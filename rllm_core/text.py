"""Third-party text on one line of a message or a terminal: limited in length, without control characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.errors import Escaped, PluginError

MAX_TEXT_CHARACTERS = 1_000


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, such as ``1 rollout`` and ``2 rollouts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Returns ``text`` as one line of limited length, without terminal control characters."""
    cut = text[:MAX_TEXT_CHARACTERS]
    line = " ".join("".join(character if character.isprintable() else " " for character in cut).split())
    return f"{line} ... ({len(text):,} characters)" if len(text) > len(cut) else line


def printable_lines(text: str) -> str:
    """Returns ``text``, which may have several lines, without terminal control characters."""
    return "".join(character if character.isprintable() or character == "\n" else " " for character in text)


def one_line(error: BaseException) -> str:
    """Returns an exception as one line of text."""
    try:
        text = printable(_text(error))
    except BaseException as mute:  # __str__ may be third-party code, and a SystemExit from it would end the process
        text = f"its message is not available: {type(mute).__name__}"
    if isinstance(error, PluginError | Escaped):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    from pydantic import ValidationError  # imported here: only errors need it, and listing commands should stay fast

    if isinstance(error, BaseExceptionGroup):
        more = f" (and {len(error.exceptions) - 1} more)" if len(error.exceptions) > 1 else ""
        return f"{error.message}: {one_line(error.exceptions[0])}{more}"
    if isinstance(error, ValidationError):
        return "; ".join(_problem(error.title, problem) for problem in error.errors())
    return str(error)


def _problem(title: str, problem: Mapping[str, Any]) -> str:
    """Returns a problem that pydantic found; its own text has one line per field and ends in a URL."""
    message, given = problem["msg"].removeprefix("Value error, "), problem["input"]
    is_number = isinstance(given, int | float) and problem["type"] not in ("extra_forbidden", "value_error")
    if is_number or problem["type"] == "enum":  # other texts may be keys of third-party settings, or too long
        message += f", got {given!r:.80}"
    return f"{'.'.join([title, *map(str, problem['loc'])])}: {message}"

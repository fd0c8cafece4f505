"""Strict JSON in model output."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from rllm_core.types import freeze


def read_json(text: str) -> Any:
    """Parses and freezes a JSON text; NaN and unpaired surrogates are errors.

    Raises:
        ValueError: If the text is not JSON, or nested too deeply.
    """
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise ValueError("text follows the JSON")
    return value


def json_at(text: str, position: int) -> tuple[Any, int]:
    """Returns the frozen JSON value at ``position``, after optional white space, and its end.

    Raises:
        ValueError: If there is no JSON value; `UnfinishedJson` if ``text`` ends within it.
    """
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    try:
        value, end = _decoder.raw_decode(text, position)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        if error.pos >= len(text) or error.msg.startswith("Unterminated"):
            raise UnfinishedJson(str(error)) from error
        raise
    return freeze(value), end


class UnfinishedJson(ValueError):
    """Raised for JSON that ends too early, but is valid up to its end."""


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_reject)

"""JSON as the standard has it, read from what a model wrote."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from rllm_core.types import freeze


def read_json(text: str) -> Any:
    """A JSON text (no NaN, no half surrogate pairs), frozen.

    Raises:
        ValueError: If it is none, or one that is nested too deeply to be read.
    """
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise ValueError("there is something after the JSON")
    return value


def json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at ``position`` or after white space there, frozen, and where it ends.

    Raises:
        ValueError: If there is none; `UnfinishedJson` if ``text`` ends before it does.
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
    """JSON that may be right as far as it goes."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)

"""Qwen3-Coder and Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

Values are bare text, so their types come from the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.hermes import CLOSE, OPEN
from rllm_renderers.formats.json_text import read_json
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, checked_call

_OPENING = re.compile(rf"{OPEN}|<function=")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
# What looks like the end of a value inside of one (code that writes this format, say) is not followed by what must be.
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]*>|</function>))")
_END_OF_FUNCTION = re.compile(r"\s*</function>")
_END_OF_CALL = re.compile(rf"\s*{CLOSE}")

# As templates print them from data, in Python's spelling.
_CONSTANTS = {"True": True, "False": False, "None": None}


class QwenXml(ToolFormat):
    """One XML-like element per function and parameter.

    A value loses one line break at its beginning and one at its end, which the format adds; everything else is content.
    """

    name = "qwen_xml"
    signs = ("<function=",)
    openings = (OPEN, "<function=")

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`. Calls without ``<tool_call>`` around them, which models write too, are read."""
        outside: list[str] = []
        calls: list[ParsedToolCall] = []
        position = 0
        while (opening := _OPENING.search(text, position)) is not None:
            outside.append(text[position : opening.start()])
            position, call = _call_at(text, opening, schemas)
            calls.append(call)
        outside.append(text[position:])
        return "".join(outside), tuple(calls)


def _call_at(text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, ParsedToolCall]:
    start = opening.start()
    is_wrapped = opening[0] == OPEN
    function = _FUNCTION.match(text, opening.end() if is_wrapped else start)
    if function is None:
        return _unreadable(text, opening, "missing_name")
    values: dict[str, str] = {}
    position = function.end()
    while (parameter := _PARAMETER.match(text, position)) is not None:
        end = _END_OF_VALUE.search(text, parameter.end())
        if end is None:
            return _unreadable(text, opening, "malformed_structure")
        values[parameter[1].strip()] = _without_line_breaks(text[parameter.end() : end.start()])
        position = end.end()
    for closing in [_END_OF_FUNCTION, _END_OF_CALL] if is_wrapped else [_END_OF_FUNCTION]:
        closed = closing.match(text, position)
        if closed is None:
            return _unreadable(text, opening, "malformed_structure")
        position = closed.end()
    name, raw = function[1].strip(), text[start:position]
    types = (schemas or {}).get(name, {})
    try:
        arguments = {key: _typed(value, types.get(key)) for key, value in values.items()}
    except ValueError:
        return position, ParsedToolCall(name or None, None, raw, "invalid_json")
    return position, checked_call(name, arguments, raw, schemas)


def _unreadable(text: str, opening: re.Match[str], status: str) -> tuple[int, ParsedToolCall]:
    """The block up to where it would end, or the next one begins."""
    close = CLOSE if opening[0] == OPEN else "</function>"
    end, following = text.find(close, opening.end()), text.find(opening[0], opening.end())
    if end < 0 or 0 <= following < end:
        stop, status = (following if following >= 0 else len(text)), "unclosed_block"
    else:
        stop = end + len(close)
    return stop, ParsedToolCall(None, None, text[opening.start() : stop], status)


def _without_line_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: Any) -> Any:
    """A value from its text.

    Raises:
        ValueError: If it is not what the schema asks for.
    """
    types = frozenset(_types(schema))
    if "string" in types:
        return None if "null" in types and text in ("null", "None") else text
    if types & {"boolean", "null"} and text.strip() in _CONSTANTS:
        return _CONSTANTS[text.strip()]
    try:
        value = read_json(text)
    except ValueError:
        if not types:
            return text
        raise
    return text if not types and isinstance(value, str) else value


def _types(schema: Any) -> Iterable[str]:
    """The JSON types a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    yield from (item for item in (declared if isinstance(declared, list | tuple) else [declared]) if item is not None)
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]:
        if declared is None:
            yield "string" if isinstance(value, str) else "null" if value is None else "boolean"
    for alternatives in ("anyOf", "oneOf"):
        for alternative in schema.get(alternatives) or ():
            yield from _types(alternative)

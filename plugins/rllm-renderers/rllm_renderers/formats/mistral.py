"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]``, newer ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import UnfinishedJson, json_at
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, call_of_object, checked_call, scan_calls

OPEN = "[TOOL_CALLS]"
_OPENING = re.compile(re.escape(OPEN))
_ARRAY = re.compile(r"\s*\[(?=\s*[\]{])")
_BETWEEN = re.compile(r"\s*+,\s*+(?=\{)")
_END_OF_ARRAY = re.compile(r"\s*\]")
_NAMED = re.compile(r"\s*+([^\s\[\]{}\"]*+)(?:\[CALL_ID\]([^\[\]{]*+))?(?:\[ARGS\])?(?=\s*(?:\{|\Z))")
_ID_CHARACTERS = 9  # Required by the family's templates.


class Mistral(ToolFormat):
    """An array of calls after one marker, or one marker per call.

    Calls without an id get one with the nine characters that the family's templates require, derived from their text.
    """

    name = "mistral"
    signs = (OPEN,)
    openings = (OPEN,)
    reasoning_tags = ("[THINK]", "[/THINK]")

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        content, calls = scan_calls(text, _OPENING, lambda opening: _calls_at(text, opening, schemas))
        return content, tuple(_with_id(call, number) for number, call in enumerate(calls))


def _calls_at(text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    array = _ARRAY.match(text, opening.end())
    if array is not None:
        return _calls_in_array(text, opening.start(), array.end(), schemas)
    return _named_call(text, opening.start(), schemas)


def _calls_in_array(text: str, start: int, position: int, schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    """Parses an array of calls; the raw text of each call extends to the next one."""
    calls: list[ParsedToolCall] = []
    while True:
        closing = _END_OF_ARRAY.match(text, position)
        if closing is not None:  # An empty array.
            return closing.end(), [ParsedToolCall(None, None, text[start : closing.end()], "malformed_structure")]
        try:
            value, end = json_at(text, position)
        except ValueError as error:
            return _unreadable(text, start, error, calls)
        closing = _END_OF_ARRAY.match(text, end)
        following = closing or _BETWEEN.match(text, end)
        if following is None:
            is_cut_off = not text[end:].strip(" \t\r\n,")
            return _unreadable(text, start, UnfinishedJson() if is_cut_off else ValueError(), calls)
        position = following.end()
        calls.append(call_of_object(value, text[start:position], schemas))
        if closing is not None:
            return position, calls
        start = position


def _named_call(text: str, start: int, schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    named = _NAMED.match(text, start + len(OPEN))
    if named is None:
        return _unreadable(text, start, ValueError("neither an array nor a name"), [])
    try:
        arguments, end = json_at(text, named.end())
    except ValueError as error:
        return _unreadable(text, start, error, [])
    return end, [checked_call(named[1], arguments, text[start:end], schemas, (named[2] or "").strip() or None)]


def _unreadable(
    text: str, start: int, error: ValueError, calls: list[ParsedToolCall]
) -> tuple[int, list[ParsedToolCall]]:
    """Treats the text up to the next marker as one failed call."""
    following = text.find(OPEN, start + 1)
    end = following if following >= 0 else len(text)
    at_end = not text[start + len(OPEN) : end].strip() or isinstance(error, UnfinishedJson)
    status = "unclosed_block" if at_end else "invalid_json"
    return end, [*calls, ParsedToolCall(None, None, text[start:end], status)]


def _with_id(call: ParsedToolCall, number: int) -> ParsedToolCall:
    if call.call_id is not None:
        return call
    digest = hashlib.sha256(f"{number} {call.raw}".encode(errors="backslashreplace")).hexdigest()
    return replace(call, call_id=digest[:_ID_CHARACTERS])

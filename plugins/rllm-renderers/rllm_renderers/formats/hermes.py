"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import re

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import json_at
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, call_of_object, scan_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPENING = re.compile(OPEN)
_CLOSING = re.compile(r"\s*" + CLOSE)


class Hermes(ToolFormat):
    """One JSON object in tags per call."""

    name = "hermes"
    signs = (OPEN,)
    openings = (OPEN,)

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`. A closing tag inside a JSON string does not close the call."""
        return scan_calls(text, _OPENING, lambda opening: _call_at(text, opening, schemas))


def _call_at(text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    try:
        value, end = json_at(text, opening.end())
        closing = _CLOSING.match(text, end)
    except ValueError:
        closing = None
    if closing is not None:
        return closing.end(), [call_of_object(value, text[opening.start() : closing.end()], schemas)]
    stop, status = end_of_block(text, opening.end())
    return stop, [ParsedToolCall(None, None, text[opening.start() : stop], status)]


def end_of_block(text: str, inside: int) -> tuple[int, str]:
    """Where a block that cannot be read ends, and why it is no call."""
    end, following = text.find(CLOSE, inside), text.find(OPEN, inside)
    if end < 0 or 0 <= following < end:
        return (following if following >= 0 else len(text)), "unclosed_block"
    return end + len(CLOSE), "invalid_json"

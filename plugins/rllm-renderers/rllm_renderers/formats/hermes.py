"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import json_at
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, call_of_object, scan_calls

_TAG = r"<[^<>\s]+>|\[[A-Z_/]+\]"
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """One JSON object in tags per call, or a list of objects.

    Args:
        tags: Tags around a call.
    """

    name = "hermes"
    signs = (OPEN,)

    def __init__(self, tags: tuple[str, str] = (OPEN, CLOSE)) -> None:
        self.tags = tags
        self.openings = (tags[0],)
        self._opening = re.compile(re.escape(tags[0]))
        self._closing = re.compile(r"\s*" + re.escape(tags[1]))

    def variants(self, written: str) -> Iterator[ToolFormat]:
        """See `ToolFormat.variants`; yields the format with the tags around the first JSON."""
        yield from map(Hermes, tags_around(written, r"[\[{]", r"[\]}]"))

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`. A closing tag inside a JSON string does not close the call."""
        return scan_calls(text, self._opening, lambda opening: self._call_at(text, opening, schemas))

    def _call_at(self, text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
        try:
            value, end = json_at(text, opening.end())
            closing = self._closing.match(text, end)
        except ValueError:
            closing = None
        if closing is None:
            stop, status = end_of_block(text, opening.end(), self.tags)
            return stop, [ParsedToolCall(None, None, text[opening.start() : stop], status)]
        raw = text[opening.start() : closing.end()]
        several = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        values = value if several else [value]
        return closing.end(), [call_of_object(one, raw, schemas) for one in values]


def tags_around(written: str, begin: str, end: str) -> Iterator[tuple[str, str]]:
    """Yields the tags around text that begins and ends with the patterns."""
    first = re.search(rf"({_TAG})\s*{begin}", written)
    last = re.search(rf"{end}\s*({_TAG})(?!.*{end})", written, re.DOTALL)
    if first is not None and last is not None and first[1] != last[1]:
        yield first[1], last[1]


def end_of_block(text: str, inside: int, tags: tuple[str, str] = (OPEN, CLOSE)) -> tuple[int, str]:
    """Returns the end of a block that cannot be parsed, and the status of its call."""
    begin, close = tags
    end, following = text.find(close, inside), text.find(begin, inside)
    if end < 0 or 0 <= following < end:
        return (following if following >= 0 else len(text)), "unclosed_block"
    return end + len(close), "invalid_json"

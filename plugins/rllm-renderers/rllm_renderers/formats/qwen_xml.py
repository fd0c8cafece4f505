"""Qwen3-Coder and Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

Values are bare text, so their types come from the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.hermes import CLOSE, OPEN, end_of_block, tags_around
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, scan_calls
from rllm_renderers.formats.typed_text import typed_call

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
# A value may contain its own end tag, in code that writes this format for example; the required next tag decides.
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]*>|</function>))")
_END_OF_FUNCTION = re.compile(r"\s*</function>")


class QwenXml(ToolFormat):
    """One XML-like element per function and parameter.

    The format adds one line break at the beginning and end of a value, which parsing removes again.

    Args:
        tags: Tags around a function.
    """

    name = "qwen_xml"
    signs = ("<function=",)

    def __init__(self, tags: tuple[str, str] = (OPEN, CLOSE)) -> None:
        self.tags = tags
        self.openings = (tags[0], "<function=")
        self._opening = re.compile(rf"{re.escape(tags[0])}|<function=")
        self._closings = [_END_OF_FUNCTION, re.compile(r"\s*" + re.escape(tags[1]))]

    def variants(self, written: str) -> Iterator[ToolFormat]:
        """See `ToolFormat.variants`; yields the format with the tags around the first function."""
        yield from map(QwenXml, tags_around(written, "<function=", "</function>"))

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`. Also parses calls without ``<tool_call>``, which models write too."""
        return scan_calls(text, self._opening, lambda opening: self._calls_at(text, opening, schemas))

    def _calls_at(self, text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
        start = opening.start()
        is_wrapped = opening[0] == self.tags[0]
        function = _FUNCTION.match(text, opening.end() if is_wrapped else start)
        if function is None:
            return self._unreadable(text, opening, "missing_name")
        values: dict[str, str] = {}
        position = function.end()
        while (parameter := _PARAMETER.match(text, position)) is not None:
            end = _END_OF_VALUE.search(text, parameter.end())
            if end is None:
                return self._unreadable(text, opening, "malformed_structure")
            values[parameter[1].strip()] = _without_line_breaks(text[parameter.end() : end.start()])
            position = end.end()
        for closing in self._closings if is_wrapped else self._closings[:1]:
            closed = closing.match(text, position)
            if closed is None:
                return self._unreadable(text, opening, "malformed_structure")
            position = closed.end()
        name, raw = function[1].strip(), text[start:position]
        return position, [typed_call(name, values, raw, schemas)]

    def _unreadable(self, text: str, opening: re.Match[str], status: str) -> tuple[int, list[ParsedToolCall]]:
        """Returns the failed block, up to its end tag or the next block."""
        close = self.tags[1] if opening[0] == self.tags[0] else "</function>"
        stop, found = end_of_block(text, opening.end(), (opening[0], close))
        status = found if found == "unclosed_block" else status
        return stop, [ParsedToolCall(None, None, text[opening.start() : stop], status)]


def _without_line_breaks(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")

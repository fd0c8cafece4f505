"""GLM: ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""

from __future__ import annotations

import re

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.hermes import CLOSE, OPEN, end_of_block
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, scan_calls
from rllm_renderers.formats.typed_text import typed_call

_NAME = re.compile(rf"{OPEN}\s*([^<\n]*)")
_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
# A value may contain its own end tag; the text that must follow a real one decides.
_END_OF_VALUE = re.compile(rf"</arg_value>(?=\s*(?:<arg_key>|{CLOSE}))")
_END = re.compile(rf"\s*{CLOSE}")


class Glm(ToolFormat):
    """The name, then alternating keys and values."""

    name = "glm"
    signs = ("<arg_key>",)
    openings = (OPEN,)

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        return scan_calls(text, _NAME, lambda opening: _call_at(text, opening, schemas))


def _call_at(text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    start, position, name = opening.start(), opening.end(), opening[1].strip()
    values: dict[str, str] = {}
    while (key := _KEY.match(text, position)) is not None:
        end_of_value = _END_OF_VALUE.search(text, key.end())
        if end_of_value is None:
            break
        values[key[1].strip()] = text[key.end() : end_of_value.start()]
        position = end_of_value.end()
    end = _END.match(text, position)
    if end is None:
        stop, status = end_of_block(text, start + len(OPEN))
        status = status if status == "unclosed_block" else "malformed_structure"
        return stop, [ParsedToolCall(None, None, text[start:stop], status)]
    raw = text[start : end.end()]
    return end.end(), [typed_call(name, values, raw, schemas)]

"""DeepSeek: calls between fullwidth markers, arguments in a fenced block (V3, R1) or bare (V3.1)."""

from __future__ import annotations

import re

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import read_json
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, checked_call, scan_calls

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_ALL, _END_OF_ALL = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
OPEN, SEPARATOR, CLOSE = (f"<{_BAR}tool▁{part}{_BAR}>" for part in ("call▁begin", "sep", "call▁end"))
# The markers around all calls belong to the raw text of the first and the last call.
_OPENING = re.compile(rf"(?:{re.escape(_ALL)}\s*)?{re.escape(OPEN)}")
_CLOSING = re.compile(rf"{re.escape(CLOSE)}(?:\s*{re.escape(_END_OF_ALL)})?")
_FENCE = "```"


class DeepSeek(ToolFormat):
    """One marked block per call: ``type | name, fenced JSON`` or ``name | JSON``."""

    name = "deepseek"
    signs = (OPEN,)
    openings = (_ALL, OPEN)

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        return scan_calls(text, _OPENING, lambda opening: _call_at(text, opening, schemas))


def _call_at(text: str, opening: re.Match[str], schemas: Schemas | None) -> tuple[int, list[ParsedToolCall]]:
    closing, following = _CLOSING.search(text, opening.end()), _OPENING.search(text, opening.end())
    if closing is None or (following is not None and following.start() < closing.start()):
        stop = following.start() if following is not None else len(text)
        return stop, [ParsedToolCall(None, None, text[opening.start() : stop], "unclosed_block")]
    raw = text[opening.start() : closing.end()]
    return closing.end(), [_call(text[opening.end() : closing.start()], raw, schemas)]


def _call(inside: str, raw: str, schemas: Schemas | None) -> ParsedToolCall:
    left, separator, right = inside.partition(SEPARATOR)
    if not separator:
        return ParsedToolCall(None, None, raw, "malformed_structure")
    name, arguments = left.strip(), right
    if not right.lstrip().startswith("{"):  # A bare value may contain a fence itself.
        before, fence, after = right.partition(_FENCE)
        if fence:
            name, arguments = before.strip(), after.rstrip().removesuffix(_FENCE).removeprefix("json")
    try:
        return checked_call(name, read_json(arguments), raw, schemas)
    except ValueError:
        return ParsedToolCall(name or None, None, raw, "invalid_json")

"""Arguments written as bare text, whose types come from the tool's schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import read_json
from rllm_renderers.formats.tool_format import Schemas, checked_call

# Templates print these values in Python's spelling.
_CONSTANTS = {"True": True, "False": False, "None": None}


def typed(text: str, schema: Any) -> Any:
    """Returns a value from its text. Without a schema, JSON is parsed, and everything else is a string.

    Raises:
        ValueError: If the text does not match the schema.
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


def typed_call(name: str, values: Mapping[str, str], raw: str, schemas: Schemas | None) -> ParsedToolCall:
    """Returns a call with arguments from bare text, and its status."""
    types = (schemas or {}).get(name, {})
    try:
        arguments = {key: typed(value, types.get(key)) for key, value in values.items()}
    except ValueError:
        return ParsedToolCall(name or None, None, raw, "invalid_json")
    return checked_call(name, arguments, raw, schemas)


def _types(schema: Any) -> Iterable[str]:
    """Yields the JSON types a schema allows, or nothing if it does not restrict them."""
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

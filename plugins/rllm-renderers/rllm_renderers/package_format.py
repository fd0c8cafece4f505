"""Parses completions with the package, for families whose calls use no format of `rllm_renderers.formats`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rllm_core.parser import ParsedCompletion, ParsedToolCall
from rllm_core.types import freeze
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, termination
from rllm_renderers.template import FamilyTemplate


class PackageFormat(ToolFormat):
    """The package's parser, with text that the package drops restored.

    Args:
        template: Template of the family.
    """

    name = "package"

    def __init__(self, template: FamilyTemplate) -> None:
        self._template = template

    def opened_by(self, prompt_end: str) -> str:
        """See `ToolFormat.opened_by`; the package reads the end of the prompt itself."""
        return prompt_end

    def read(
        self, text: str, *, stopped: bool, opened_by_prompt: str = "", schemas: Schemas | None = None
    ) -> ParsedCompletion:
        """See `ToolFormat.read`. Text that the package drops, such as text after a call, becomes content."""
        pieces = self._template.pieces
        ids = pieces.encode(text)
        try:
            response = self._template.family.parse_response(
                ids,
                tools=None if schemas is None else [_tool(name, types) for name, types in schemas.items()],
                prompt_ids=pieces.encode(opened_by_prompt) or None,
            )
        except (ValueError, RecursionError):
            # JSON that Python cannot read: numbers with thousands of digits, thousands of nested levels.
            unread = (ParsedToolCall(None, None, text, "invalid_json"),)
            return ParsedCompletion("", tool_calls=unread, termination=termination(stopped, unread, None))
        calls = tuple(_call(call, schemas) for call in response.tool_calls)
        is_open = response.reasoning_complete is False
        reasoning = "" if response.reasoning_content is None and is_open else response.reasoning_content
        complete = None if reasoning is None else response.reasoning_complete
        outside = self._outside(ids, response.tool_calls, reasoning or "")
        content = response.content if _letters(outside) <= _letters(response.content) else outside.strip()
        return ParsedCompletion(content, reasoning, calls, termination(stopped, calls, complete), complete)

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        parsed = self.read(text, stopped=True, schemas=schemas)
        return parsed.content, parsed.tool_calls

    def _outside(self, ids: list[int], calls: list[Any], reasoning: str) -> str:
        """Returns the text outside calls and reasoning, without their control tokens."""
        inside = {at for call in calls if call.token_span is not None for at in range(*call.token_span)}
        text = self._template.pieces.decode([token for at, token in enumerate(ids) if at not in inside])
        for call in calls:
            text = text.replace(call.raw, "", 1) if call.token_span is None and call.raw else text
        before, _, rest = text.partition(reasoning) if reasoning else ("", "", text)
        for spelling in self._template.encoder.control_tokens:
            before, rest = before.replace(spelling, ""), rest.replace(spelling, "")
        return before + rest


def _letters(text: str) -> int:
    return sum(not character.isspace() for character in text)


def _tool(name: str, types: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(types)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _call(call: Any, schemas: Schemas | None) -> ParsedToolCall:
    """Converts a call of the package; it is executable only if its name is text and its arguments a JSON object."""
    status, name = str(call.status), call.name
    if not isinstance(name, str) or not name:
        name, status = None, "missing_name" if status == "ok" else status
    arguments = call.arguments
    if isinstance(arguments, str) and status == "ok":
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            status = "invalid_json"
    if not isinstance(arguments, Mapping):
        arguments, status = None, "malformed_structure" if status == "ok" else status
    try:
        arguments = freeze(arguments)
    except ValueError:  # NaN or an unpaired surrogate, which are not valid JSON.
        arguments, status = None, "invalid_json" if status == "ok" else status
    known = schemas is None or name in schemas
    parsed = ParsedToolCall(name, arguments, call.raw, status, call.id)
    return parsed if known or status != "ok" else replace(parsed, status="unknown_tool")

"""The text of a completion as a message: reasoning in ``<think>``, tool calls as JSON in ``<tool_call>``.

This is the format of the Hermes and Qwen families. Nothing here raises on what a model may write.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination
from rllm_core.types import freeze

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def read_completion(
    text: str, *, stopped: bool, opened_by_prompt: bool = False, tool_names: Collection[str] | None = None
) -> ParsedCompletion:
    """Read a completion without its stop token.

    Args:
        text: What was sampled before the first stop token.
        stopped: Whether a stop token was sampled.
        opened_by_prompt: Whether the prompt ended with ``<think>``, so that the completion begins inside its reasoning.
        tool_names: Names a call may have; None allows all.

    Returns:
        The message. Text without any construct is its content unchanged; otherwise content and reasoning are stripped
        of white space at their edges. A tool call inside the reasoning ends the reasoning. Reasoning that never ends
        leaves no content.
    """
    termination = Termination.STOP if stopped else Termination.TRUNCATED
    if not opened_by_prompt and THINK not in text and CALL not in text:
        return ParsedCompletion(text, termination=termination)
    reasoning, rest, complete = _split_reasoning(text, opened_by_prompt)
    content, calls = _split_calls(rest, tool_names)
    has_constructs = reasoning is not None or calls
    if stopped and (complete is False or any(call.status == "unclosed_block" for call in calls)):
        termination = Termination.MALFORMED
    return ParsedCompletion(
        content.strip() if has_constructs else content,
        reasoning=reasoning,
        tool_calls=calls,
        termination=termination,
        reasoning_complete=complete,
    )


def _split_reasoning(text: str, opened_by_prompt: bool) -> tuple[str | None, str, bool | None]:
    """The reasoning, what follows it, and whether it ended; reasoning counts only at the very beginning."""
    body = text.lstrip()
    if body.startswith(THINK):
        body = body[len(THINK) :]
    elif opened_by_prompt:
        body = text
    else:
        return None, text, None
    end, call = body.find(END_THINK), body.find(CALL)
    if call >= 0 and (end < 0 or call < end):
        return body[:call].strip(), body[call:], True
    if end < 0:
        return body.strip(), "", False
    return body[:end].strip(), body[end + len(END_THINK) :], True


def _split_calls(text: str, tool_names: Collection[str] | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
    """The text outside of tool calls, and the calls."""
    outside: list[str] = []
    calls: list[ParsedToolCall] = []
    position = 0
    while (start := text.find(CALL, position)) >= 0:
        outside.append(text[position:start])
        inside = start + len(CALL)
        end, following = text.find(END_CALL, inside), text.find(CALL, inside)
        if end < 0 or 0 <= following < end:
            position = following if following >= 0 else len(text)
            calls.append(ParsedToolCall(None, None, text[start:position], "unclosed_block"))
        else:
            position = end + len(END_CALL)
            calls.append(_read_call(text[inside:end], text[start:position], tool_names))
    outside.append(text[position:])
    return "".join(outside), tuple(calls)


def _read_call(inside: str, raw: str, tool_names: Collection[str] | None) -> ParsedToolCall:
    try:
        value = _json(inside)
        if not isinstance(value, dict):
            return ParsedToolCall(None, None, raw, "malformed_structure")
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments)
    except (ValueError, RecursionError):
        return ParsedToolCall(None, None, raw, "invalid_json")
    if not isinstance(name, str) or not name:
        return ParsedToolCall(None, None, raw, "missing_name")
    if not isinstance(arguments, Mapping):
        return ParsedToolCall(name, None, raw, "malformed_structure")
    known = tool_names is None or name in tool_names
    return ParsedToolCall(name, arguments, raw, "ok" if known else "unknown_tool")


def _json(text: str) -> Any:
    """JSON as the standard has it (no NaN, no half surrogate pairs), frozen.

    Raises:
        ValueError: If it is not.
        RecursionError: If it is nested too deeply to be read.
    """
    return freeze(json.loads(text, parse_constant=_refuse))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")

"""Converts messages and tools to and from Inspect's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rllm_viewer.travel.contract import Row
from rllm_viewer.travel.conversations import JsonMessage, ToolCall
from rllm_viewer.travel.fields import same_json
from rllm_viewer.travel.rllm_extra import KEY

ROLES = ("system", "user", "assistant", "tool")


def to_message(message: JsonMessage) -> Row:
    """Converts a message to Inspect's format; parts that the format cannot express exactly go into metadata."""
    found = _native(message)
    return found if same_json(from_message(found), message) else found | {"metadata": {KEY: {"message": message}}}


def from_message(native: Mapping[str, Any]) -> JsonMessage:
    """Inverts `to_message`; from third-party messages, reads text, reasoning, images and tool calls."""
    own = ((native.get("metadata") or {}).get(KEY) or {}).get("message")
    if isinstance(own, dict):
        return own
    content, reasoning = _content(native.get("content"))
    found: JsonMessage = {"role": native["role"], "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls := native.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ]
    if native["role"] == "tool" and native.get("tool_call_id"):
        found["tool_call_id"] = native["tool_call_id"]
    return found


def to_tool(tool: Any) -> Row:
    """Converts a tool to Inspect's ``ToolInfo``."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    parameters = function.get("parameters") or {}
    return {
        "name": str(function.get("name", "")),
        "description": str(function.get("description") or ""),
        "parameters": {"type": "object", "properties": {}, "required": [], **parameters},
    }


def from_tool(native: Mapping[str, Any]) -> Row:
    """Inverts `to_tool` for tools in OpenAI's format."""
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: native[name] for name in names if name in native}}


def _native(message: JsonMessage) -> Row:
    role = message["role"] if message["role"] in ROLES else "system"
    content = message.get("content")
    found: Row = {"role": role, "content": content if isinstance(content, str) else _parts(content)}
    if isinstance(message.get("reasoning_content"), str):
        text = [{"type": "text", "text": content}] if isinstance(content, str) and content else []
        found["content"] = [{"type": "reasoning", "reasoning": message["reasoning_content"]}, *text]
    if role == "assistant" and (calls := message.get("tool_calls")):
        found["tool_calls"] = [_call(ToolCall.of(call, at)) for at, call in enumerate(calls)]
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _parts(content: Any) -> Any:
    found = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            found.append({"type": "text", "text": str(part.get("text", ""))})
        elif kind == "image_url" and isinstance(part.get("image_url"), Mapping):
            found.append({"type": "image", "image": str(part["image_url"].get("url", "")), "detail": "auto"})
    return found or ""


def _content(content: Any) -> tuple[Any, str]:
    if not isinstance(content, list):
        return content, ""
    reasoning = "".join(str(part.get("reasoning", "")) for part in content if part.get("type") == "reasoning")
    parts: list[Row] = []
    for part in content:
        if part.get("type") == "text":
            parts.append({"type": "text", "text": part["text"]})
        elif part.get("type") == "image":
            parts.append({"type": "image_url", "image_url": {"url": part["image"]}})
    if all(part["type"] == "text" for part in parts) and (reasoning or len(parts) == 1):
        return "".join(part["text"] for part in parts), reasoning
    return parts, reasoning


def _call(call: ToolCall) -> Row:
    return {"id": call.call_id, "function": call.name, "arguments": call.parsed_arguments, "type": "function"}

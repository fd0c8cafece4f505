"""Normalizes messages of all clients, and hashes their meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rllm_core.types import well_formed
from rllm_gateway.errors import BadRequest

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"developer": "system", "function": "tool"}
DIGEST_BYTES = 16
EMPTY = b"\0" * DIGEST_BYTES


def normalized(message: Any) -> dict[str, Any]:
    """Returns a message reduced to what templates read: role, content, reasoning, tool calls and the call id.

    Raises:
        BadRequest: If it is not a valid message.
    """
    if not isinstance(message, Mapping):
        raise BadRequest(f"a message must be an object, not {type(message).__name__}")
    role = message.get("role")
    if isinstance(role, str):
        role = ALIASES.get(role, role)
    if role not in ROLES:
        raise BadRequest(f"unknown role {role!r:.40}: use one of {', '.join((*ROLES, *ALIASES))}")
    found: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            if isinstance(message.get(key), str) and message[key]:
                found["reasoning_content"] = well_formed(message[key])
                break
        calls = message.get("tool_calls") or ()
        if not calls and message.get("function_call"):  # the form before tool_calls
            calls = [{"function": message["function_call"]}]
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise BadRequest("tool_calls must be a list")
        if calls:
            found["tool_calls"] = [_call(call) for call in calls]
    elif role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(message.get(key), str):
                found[key] = well_formed(message[key])
    return found


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Returns text if all parts are text, otherwise the list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return well_formed(content)
    if not isinstance(content, Sequence):
        raise BadRequest(f"content must be text or a list of parts, not {type(content).__name__}")
    parts = [_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": well_formed(part)}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise BadRequest(f"a part of type {kind!r} needs its text")
        return {"type": "text", "text": well_formed(text)}
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if not isinstance(url, str) or not url.startswith("data:"):
            raise BadRequest("an image must be a data: URL, because nothing is fetched from the network")
        return {"type": "image_url", "image_url": {"url": url}}
    raise BadRequest(f"content of type {kind!r} is not supported: use text or image_url")


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool call needs a function with a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    called = {"name": well_formed(function["name"]), "arguments": well_formed(arguments)}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


def chained(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Returns the hash of a conversation, from the hash of all messages but the last.

    The hash leaves out what clients rewrite: ids, reasoning, white space and key order in arguments, and white space
    around text.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        meaning: Any = content.strip()
    else:
        meaning = [part["text"].strip() if part["type"] == "text" else part for part in content]
    calls = [_meaning(call["function"]) for call in message.get("tool_calls") or ()]
    said = json.dumps([message["role"], meaning, calls], sort_keys=True)
    return hashlib.blake2b(before + said.encode(), digest_size=DIGEST_BYTES).digest()


def _meaning(function: Mapping[str, Any]) -> list[Any]:
    try:
        arguments = json.loads(function["arguments"], parse_float=_number)
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return [function["name"], arguments]


def _number(text: str) -> int | float:
    """Returns integral numbers as integers, because JavaScript writes 1.0 as 1."""
    number = float(text)
    return int(number) if number.is_integer() else number

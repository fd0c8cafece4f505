"""Compares messages from a client, which may rewrite them, with the recorded messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rllm_core.types import FrozenDict

_MAY_BE_LEFT_OUT = {"name", "reasoning_content"}
_ADDED_BY_CLIENTS = {"annotations", "audio", "function_call", "provider_specific_fields", "refusal"}


def same_message(theirs: FrozenDict, ours: FrozenDict) -> bool:
    """Whether a client's message means the same to a template as the recorded one, even if the client rewrote it.

    Clients write text as parts, strip it, add their own fields, and leave out names and reasoning.
    """
    if theirs is ours or theirs == ours:
        return True
    left, right = _canonical(theirs), _canonical(ours)
    for key in _MAY_BE_LEFT_OUT - left.keys():
        right.pop(key, None)
    if ours["role"] == "assistant":  # the policy has no name
        left.pop("name", None)
    return left == right


def _canonical(message: FrozenDict) -> dict[str, Any]:
    plain = {
        key: value for key, value in message.items() if key not in _ADDED_BY_CLIENTS and value not in (None, "", [])
    }
    for alias in ("reasoning", "thinking"):
        if alias in plain:
            plain.setdefault("reasoning_content", plain.pop(alias))
    for key in ("content", "reasoning_content"):
        if key in plain:
            plain[key] = _canonical_content(plain[key])
            if plain[key] in ("", []):
                del plain[key]
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return plain


def _canonical_content(content: Any) -> Any:
    """Returns text without surrounding white space; content with other parts, such as images, part by part."""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list):
        return content
    parts = [part["text"] if _is_text(part) else part for part in content]
    return "".join(parts).strip() if all(isinstance(part, str) for part in parts) else parts


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _canonical_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # not JSON: compare the raw text
    return function.get("name"), arguments

"""When two messages are the same to a template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rllm_core.types import FrozenDict


def same_message(left: FrozenDict, right: FrozenDict) -> bool:
    """Whether two messages mean the same to a template, regardless of how a client wrote them."""
    return left is right or left == right or _canonical(left) == _canonical(right)


def _canonical(message: FrozenDict) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value not in (None, "", [])}
    for alias in ("reasoning", "thinking"):
        if alias in plain:
            plain.setdefault("reasoning_content", plain.pop(alias))
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return plain


def _canonical_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # compared as the text it is
    return function.get("name"), arguments

"""Tools of the players, which import nothing of rllm-core."""

from __future__ import annotations

INSTRUCTIONS = "Use the tools."


def add(a: int, b: int) -> str:
    """Calculates a plus b.

    Args:
        a: first number
        b: second number
    """
    return str(a + b)


def mul(a: int, b: int) -> str:
    """Calculates a times b.

    Args:
        a: first number
        b: second number
    """
    return str(a * b)


def sub(a: int, b: int) -> str:
    """Calculates a minus b.

    Args:
        a: first number
        b: second number
    """
    return str(a - b)


TOOLS = {tool.__name__: tool for tool in (add, mul, sub)}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calculates {name}.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    for name in TOOLS
]

"""Response bodies for calls that get no answer."""

from __future__ import annotations

from typing import Any

from rllm_gateway.errors import CallRefused, TooLong

ANTHROPIC_TYPES = {"server_error": "api_error"}


def of_openai(refused: CallRefused) -> dict[str, Any]:
    """Returns the body that clients of OpenAI's interfaces expect."""
    return {"error": {"message": str(refused), "type": refused.kind, "param": None, "code": refused.code}}


def of_anthropic(refused: CallRefused) -> dict[str, Any]:
    """Returns the body that clients of Anthropic's interface expect."""
    # Agents that compact their history look for these words in the error.
    message = f"prompt is too long: {refused}" if isinstance(refused, TooLong) else str(refused)
    told = {"type": ANTHROPIC_TYPES.get(refused.kind, refused.kind), "message": message}
    return {"type": "error", "error": told | ({"details": {"error_code": refused.code}} if refused.code else {})}


def event_of_chat(refused: CallRefused) -> tuple[str | None, Any]:
    """Returns the event that ends a stream of chat completions without an answer."""
    return None, of_openai(refused)


def event_of_responses(refused: CallRefused) -> tuple[str | None, Any]:
    """Returns the event that ends a stream of Responses without an answer."""
    return "error", {"type": "error", "sequence_number": 0, **of_openai(refused)["error"]}


def event_of_anthropic(refused: CallRefused) -> tuple[str | None, Any]:
    """Returns the event that ends a stream of Messages without an answer."""
    return "error", of_anthropic(refused)

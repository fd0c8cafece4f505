"""Requests to an endpoint: counts each, including the SDK's retries, and limits the size of replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rllm_core.costs import JUDGE, spend

MAX_REPLY_BYTES = 8 << 20

_sent: ContextVar[list[Any] | None] = ContextVar("sent", default=None)


class Flood(Exception):
    """An endpoint sent more than the size limit of a reply."""


class BrokenOff(Exception):
    """A reply ended before its end."""


@dataclass(frozen=True)
class Reply:
    """The reply of an endpoint.

    Attributes:
        text: Text of the model; empty if the reply has none, or it cannot be found.
        usage: Prompt and completion tokens; None if the endpoint does not report them.
    """

    text: str
    usage: tuple[int, int] | None


async def reply_in(parts: AsyncIterator[bytes]) -> Reply:
    """Reads the body of a reply.

    Raises:
        BrokenOff: If the connection fails in the middle of the body.
        Flood: If the body is larger than `MAX_REPLY_BYTES`.
    """
    body = bytearray()
    try:
        async for part in parts:
            body += part
            if len(body) > MAX_REPLY_BYTES:
                break
    except Exception as error:  # of the HTTP library, which depends on the version of the SDK; the SDK does not wrap it
        raise BrokenOff("the reply broke off") from error
    if len(body) > MAX_REPLY_BYTES:
        raise Flood(f"the judge's reply has more than {MAX_REPLY_BYTES} bytes")
    return reply_of(body)


def reply_of(body: bytes | bytearray) -> Reply:
    """Parses a complete body; leaves out fields that are missing or have another form."""
    try:
        answer = json.loads(body)
    except ValueError:
        return Reply("", None)
    choice = _at(answer, "choices", 0, "message", "content")
    used = _at(answer, "usage", "prompt_tokens"), _at(answer, "usage", "completion_tokens")
    usage = (used[0], used[1]) if all(type(tokens) is int and tokens >= 0 for tokens in used) else None
    return Reply(choice if isinstance(choice, str) else "", usage)


def _at(value: Any, *path: str | int) -> Any:
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


@contextmanager
def metered() -> Iterator[list[tuple[int, int]]]:
    """Counts the requests sent in the ``with`` body whose replies' token usage that body does not put into the list."""
    sent: list[Any] = []
    answered: list[tuple[int, int]] = []
    token = _sent.set(sent)
    try:
        yield answered
    finally:
        _sent.reset(token)
        if unmetered := len(sent) - len(answered):
            spend(JUDGE, calls=unmetered, unmetered=unmetered)


def note(request: Any) -> None:
    """Client hook that counts a request."""
    sent = _sent.get()
    if sent is not None:
        sent.append(request)


async def note_async(request: Any) -> None:
    """Client hook that counts a request, for asynchronous clients."""
    note(request)


def end_long_waits(response: Any, max_seconds: float) -> None:
    """Client hook that ends the SDK's retries once the pauses that an endpoint asks for exceed ``max_seconds``.

    The error is then the endpoint's answer, and not a timeout of the caller.
    """
    sent, pause = _sent.get(), response.headers.get("Retry-After", "")
    if sent is not None and pause.isdecimal() and len(sent) * int(pause) > max_seconds:
        response.headers["x-should-retry"] = "false"


async def end_long_waits_async(response: Any, max_seconds: float) -> None:
    """See `end_long_waits`; for asynchronous clients."""
    end_long_waits(response, max_seconds)

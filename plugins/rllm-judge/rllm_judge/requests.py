"""Requests to an endpoint: each is counted, also one that the SDK repeats, and none may answer without end."""

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
    """An endpoint answers with more than a reply can have."""


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered.

    Attributes:
        text: Text of the model; empty if there is none, or it cannot be found.
        usage: Prompt and completion tokens; None if the endpoint does not say.
    """

    text: str
    usage: tuple[int, int] | None


async def reply_in(parts: AsyncIterator[bytes]) -> Reply:
    """Reads the body of an answer.

    Raises:
        Flood: If it has more than `MAX_REPLY_BYTES`.
    """
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise Flood(f"the judge's reply has more than {MAX_REPLY_BYTES} bytes")
    return reply_of(body)


def reply_of(body: bytes | bytearray) -> Reply:
    """Returns what a complete body says; what is missing or has another form is left out."""
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
    """Counts the requests sent in its body, as far as it does not put the usage of their answers into the list."""
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
    """Notes a request, as a hook of a client."""
    sent = _sent.get()
    if sent is not None:
        sent.append(request)


async def note_async(request: Any) -> None:
    """Notes a request, as a hook of an asynchronous client."""
    note(request)

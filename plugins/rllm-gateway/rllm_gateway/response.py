"""What a client gets, whatever the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}
KEEP_ALIVE_SECONDS = 15.0
MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE = b": waiting for the model\n\n"


@dataclass
class Response:
    """What a client gets.

    Attributes:
        status: HTTP status.
        headers: Headers.
        body: The body, or the rest of one that has been begun.
        delivered: Called once the client has got all of it.
        sending: Gets the connection for as long as it is being sent.
        rest: The response that a stream goes on with, if it takes long. Until then, comments keep the client waiting.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    delivered: Callable[[], None] = lambda: None
    sending: set[asyncio.Transport] = field(default_factory=set)
    rest: asyncio.Task[Response] | None = None

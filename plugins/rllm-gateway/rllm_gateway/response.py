"""The response to a client, independent of the server library."""

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
    """A response to a client.

    Attributes:
        status: HTTP status.
        headers: Headers.
        body: The body, or the rest of a body that has already started.
        delivered: Called once the client has received the whole response.
        sending: Collection that holds the connection while the response is being sent.
        rest: The rest of a slow streamed response. Until it is ready, comments keep the connection alive.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    delivered: Callable[[], None] = lambda: None
    sending: set[asyncio.Transport] = field(default_factory=set)
    rest: asyncio.Task[Response] | None = None

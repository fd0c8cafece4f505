"""The gateway: one server for all rollouts of a process, and one endpoint for each of them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from rllm_core.engine import Completer
from rllm_gateway.calls import Answer, Call
from rllm_gateway.dialects import anthropic, chat, responses
from rllm_gateway.endpoint import Endpoint
from rllm_gateway.errors import BadRequest, Failed, Forbidden, NotFound, Refused, UnknownRollout

SECRET_BYTES = 18
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
NO_RETRY = {"x-should-retry": "false"}
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store"}


class Dialect(NamedTuple):
    """An interface that agents speak.

    Attributes:
        read: Reads a request.
        written: Writes a response.
        events: Writes a streamed response.
        error: Writes a response without an answer.
    """

    read: Callable[..., Call]
    written: Callable[[Call, Sequence[Answer]], dict[str, Any]]
    events: Callable[[Call, Sequence[Answer], Mapping[str, Any]], Iterator[tuple[str | None, Any]]]
    error: Callable[[Refused], dict[str, Any]]


DIALECTS = {
    "chat/completions": Dialect(chat.read, chat.written, chat.events, chat.error),
    "responses": Dialect(responses.read, responses.written, responses.events, responses.error),
    "messages": Dialect(anthropic.read, anthropic.written, anthropic.events, anthropic.error),
}


@dataclass
class Response:
    """What a client gets.

    Attributes:
        status: HTTP status.
        headers: Headers.
        body: The whole body.
        delivered: Called once the client has got all of it.
    """

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    delivered: Callable[[], None] = lambda: None


class Gateway:
    """Serves rollouts to agents on this machine's loopback interface.

    Args:
        max_calls: Maximum number of calls per rollout, or None.
        unsupported_fields: What to do with a field that an agent may rely on and that cannot be honored.
    """

    def __init__(
        self, *, max_calls: int | None = None, unsupported_fields: Literal["refuse", "ignore"] = "refuse"
    ) -> None:
        self._max_calls = max_calls
        self._ignores = unsupported_fields == "ignore"
        self._endpoints: dict[str, Endpoint] = {}
        self._server: Any = None

    async def open(self) -> None:
        """Starts the server, on a free port."""
        from rllm_gateway.server import Server

        self._server = Server(self.handle)
        await self._server.open()

    async def close(self) -> None:
        """Stops the server."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    @property
    def url(self) -> str:
        """Address of the server; empty if the gateway is used without one."""
        return "" if self._server is None else f"http://127.0.0.1:{self._server.port}"

    @asynccontextmanager
    async def rollout(self, completer: Completer) -> AsyncIterator[Endpoint]:
        """Opens the endpoint of a rollout. On leaving, running calls are cancelled and its secret is void.

        Raises:
            Exception: On leaving, what the engine or the parser raised for a call, whatever the agent made of it.
            Terminated: On leaving, if the agent's last call was too long, or it made too many.
        """
        secret = secrets.token_urlsafe(SECRET_BYTES)
        endpoint = self._endpoints[secret] = Endpoint(completer, self.url, secret, max_calls=self._max_calls)
        try:
            yield endpoint
        finally:
            del self._endpoints[secret]
            await endpoint.close()
            # What failed for the agent explains its own error, and counts even if the agent went on without an answer.
            if endpoint.failure is not None and not isinstance(sys.exception(), asyncio.CancelledError):
                raise endpoint.failure

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answers a request.

        Args:
            method: HTTP method.
            path: Path without the query.
            headers: Headers, with lower-case names.
            body: The body.
        """
        dialect = next((one for end, one in DIALECTS.items() if path.endswith(end)), DIALECTS["chat/completions"])
        try:
            return await self._handle(method, path, headers, body, dialect)
        except Refused as refused:
            content = msgspec.json.encode(dialect.error(refused))
            return Response(refused.status, content, JSON | NO_RETRY)

    async def _handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, dialect: Dialect
    ) -> Response:
        _check_host(headers)
        endpoint, rest = self._found(path, headers)
        if method == "GET" and rest == "models":
            return Response(200, msgspec.json.encode(_models()))
        if method != "POST" or rest not in DIALECTS:
            raise NotFound(f"there is no {method} {rest!r}: use {', '.join(DIALECTS)} or models")
        request = _parsed(body)
        try:
            call = dialect.read(request, ignores=self._ignores)
            call.digest = hashlib.blake2b(rest.encode() + b"\0" + body, digest_size=16).digest()
            call.is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
            answers = await endpoint.answer(call)
            content, kind = _content(dialect, call, answers, request)
        except Refused:
            raise
        except Exception as error:
            endpoint.failure = endpoint.failure or error
            raise Failed(f"{type(error).__name__}: {error}") from error

        def delivered() -> None:
            for answer in answers:
                answer.is_delivered = True

        return Response(200, content, dict(kind), delivered)

    def _found(self, path: str, headers: Mapping[str, str]) -> tuple[Endpoint, str]:
        """Returns the endpoint by the secret in the path or the key, and the rest of the path."""
        parts = path.strip("/").split("/")
        if parts[0] == "r" and len(parts) > 1:
            secret, parts = parts[1], parts[2:]
        else:
            secret = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        if parts and parts[0] == "v1":
            parts = parts[1:]
        endpoint = self._endpoints.get(secret)
        if endpoint is None:
            raise UnknownRollout("no running rollout has this key")
        return endpoint, "/".join(parts)


def _check_host(headers: Mapping[str, str]) -> None:
    """Refuses requests that a browser was lured into, by a name that leads to this machine."""
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOCAL_HOSTS:
        raise Forbidden(f"requests must be addressed to 127.0.0.1, not {name[:80]!r}", code="wrong_host")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise BadRequest(f"the body must be an object, not {type(request).__name__}")
    return request


def _content(
    dialect: Dialect, call: Call, answers: Sequence[Answer], request: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    if not request.get("stream"):
        return msgspec.json.encode(dialect.written(call, answers)), JSON
    lines = []
    for name, data in dialect.events(call, answers, request):
        if name is not None:
            lines.append(b"event: " + name.encode())
        lines += [b"data: " + (data.encode() if isinstance(data, str) else msgspec.json.encode(data)), b""]
    return b"\n".join([*lines, b""]), EVENTS


def _models() -> dict[str, Any]:
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rllm-core"}
    return {"object": "list", "data": [model]}

"""The gateway: one server for all rollouts of a process, with one endpoint per rollout."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from rllm_core.engine import Completer
from rllm_gateway.bodies import Form
from rllm_gateway.calls import AnswerNode, ClientCall
from rllm_gateway.dialects import anthropic, chat, refusals, responses
from rllm_gateway.endpoint import MAX_REQUEST_BYTES, Endpoint, Options
from rllm_gateway.errors import CallRefused, Forbidden, NotFound, TooLarge, UnknownRollout
from rllm_gateway.response import EVENTS, JSON, KEEP_ALIVE, KEEP_ALIVE_SECONDS, MAX_BODY_BYTES, Response

SECRET_BYTES = 18
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
NO_RETRY = {"x-should-retry": "false"}


class Dialect(NamedTuple):
    """An API that agents speak.

    Attributes:
        form: Where its requests carry the conversation.
        read: Reads a request.
        written: Writes a response.
        events: Writes a streamed response.
        failed: Writes the event that ends a stream without an answer.
    """

    form: Form
    read: Callable[..., ClientCall]
    written: Callable[[ClientCall, Sequence[AnswerNode]], dict[str, Any]]
    events: Callable[[ClientCall, Sequence[AnswerNode], Mapping[str, Any]], Iterator[tuple[str | None, Any]]]
    failed: Callable[[CallRefused], tuple[str | None, Any]]


DIALECTS = {
    "chat/completions": Dialect(chat.FORM, chat.read, chat.written, chat.events, refusals.event_of_chat),
    "responses": Dialect(
        responses.FORM, responses.read, responses.written, responses.events, refusals.event_of_responses
    ),
    "messages": Dialect(
        anthropic.FORM, anthropic.read, anthropic.written, anthropic.events, refusals.event_of_anthropic
    ),
}
COUNTS = "messages/count_tokens"
PATHS = (*DIALECTS, COUNTS, "models")


class Gateway:
    """Serves the policy to agents on this machine's loopback interface.

    Args:
        max_calls: Maximum number of calls per rollout, or None for no limit.
        max_request_bytes: Maximum total size of a rollout's requests.
        unsupported_fields: How to treat a field that cannot be honored and that an agent may rely on.
        hide_tools: Whether to hide the tools from the model.
        hide_system: Whether to hide system messages from the model.
        unix_socket: Whether to serve on a Unix socket too, for agents without this machine's network.
    """

    def __init__(
        self,
        *,
        max_calls: int | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        unsupported_fields: Literal["refuse", "ignore"] = "refuse",
        hide_tools: bool = False,
        hide_system: bool = False,
        unix_socket: bool = False,
    ) -> None:
        self._options = Options(max_calls, max_request_bytes, hide_tools, hide_system)
        self._has_socket = unix_socket
        self._ignores = unsupported_fields == "ignore"
        self._endpoints: dict[str, Endpoint] = {}
        self._server: Any = None

    async def open(self) -> None:
        """Starts the server on a free port."""
        from rllm_gateway.server import Server

        self._server = Server(self.handle, unix_socket=self._has_socket)
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
        """Opens the endpoint of a rollout. On exit, running calls are cancelled and the secret becomes invalid.

        Raises:
            Exception: On exit, the engine's or parser's error in a call, even if the agent handled it.
            Terminated: On exit, if the agent's last call was too long, or the agent made too many calls.
        """
        secret = secrets.token_urlsafe(SECRET_BYTES)
        endpoint = self._endpoints[secret] = Endpoint(
            completer,
            self.url,
            secret,
            options=self._options,
            socket="" if self._server is None else self._server.socket,
        )
        try:
            yield endpoint
        finally:
            del self._endpoints[secret]
            await endpoint.close()
            # A failed call explains the agent's own error. It also counts if the agent continued without an answer.
            if endpoint.failure is not None and not isinstance(sys.exception(), asyncio.CancelledError):
                raise endpoint.failure

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        """Answers a request.

        Args:
            method: HTTP method.
            path: Path without the query.
            headers: Headers, with lower-case names.
            body: The body; None if it is too large to be read.
        """
        of_anthropic = path.endswith(("messages", COUNTS)) or "anthropic-version" in headers
        error = refusals.of_anthropic if of_anthropic else refusals.of_openai
        try:
            return await self._handle(method, path, headers, body)
        except CallRefused as refused:
            return Response(refused.status, msgspec.json.encode(error(refused)), JSON | NO_RETRY)

    async def _handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        _check_host(headers)
        endpoint, rest = self._found(path, headers)
        resource, _, model = rest.partition("/")
        if method == "GET" and resource == "models":
            return Response(200, msgspec.json.encode(_model(model) if model else _models()))
        with endpoint.failing():
            dialect = DIALECTS.get("messages" if rest == COUNTS else rest)
            if method != "POST" or dialect is None:
                raise NotFound(f"there is no {method} {rest!r}: use {', '.join(PATHS)}")
            if body is None:
                raise TooLarge(f"a body may have at most {MAX_BODY_BYTES:,} bytes")
            endpoint.receive(len(body))
            found = endpoint.bodies.read(dialect.form, body)
            if rest == COUNTS:
                counted = await endpoint.count(anthropic.read_to_count(found.fields, found.history, ignores=True))
                return Response(200, msgspec.json.encode(anthropic.counted(counted)))
            call = dialect.read(found.fields, found.history, ignores=self._ignores)
            call.digest = found.digest
            call.is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        answered = self._answered(endpoint, dialect, call, found.fields)
        response = await (_streamed(answered, dialect) if found.fields.get("stream") else answered)
        response.sending = endpoint.sending
        return response

    async def _answered(
        self, endpoint: Endpoint, dialect: Dialect, call: ClientCall, fields: Mapping[str, Any]
    ) -> Response:
        with endpoint.failing():
            answers = await endpoint.answer(call)
            content, kind = _content(dialect, call, answers, fields)

        def delivered() -> None:
            for answer in answers:
                answer.is_delivered = True

        return Response(200, content, dict(kind), delivered)

    def _found(self, path: str, headers: Mapping[str, str]) -> tuple[Endpoint, str]:
        """Returns the endpoint of the secret in the path or API key, and the rest of the path."""
        parts = path.strip("/").split("/")
        if parts[0] == "r" and len(parts) > 1:
            secret, parts = parts[1], parts[2:]
        else:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            secret = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if parts and parts[0] == "v1":
            parts = parts[1:]
        endpoint = self._endpoints.get(secret)
        if endpoint is None:
            raise UnknownRollout("no running rollout has this key")
        return endpoint, "/".join(parts)


def _check_host(headers: Mapping[str, str]) -> None:
    """Refuses requests from a browser that was lured here by a host name that resolves to this machine."""
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in LOCAL_HOSTS:
        raise Forbidden(f"requests must be addressed to 127.0.0.1, not {name[:80]!r}", code="wrong_host")


async def _streamed(answered: Coroutine[Any, Any, Response], dialect: Dialect) -> Response:
    """Returns a streamed response. A slow one starts before its answer is ready, so that no proxy or client gives up.

    An error before that start is sent with its own HTTP status.
    """
    task = asyncio.ensure_future(answered)
    try:
        await asyncio.wait([task], timeout=KEEP_ALIVE_SECONDS)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return task.result()
    return Response(200, KEEP_ALIVE, dict(EVENTS), rest=asyncio.ensure_future(_rest(task, dialect)))


async def _rest(task: asyncio.Task[Response], dialect: Dialect) -> Response:
    try:
        return await task
    except CallRefused as refused:
        return Response(200, _lines([dialect.failed(refused)]), dict(EVENTS))
    finally:
        task.cancel()


def _content(
    dialect: Dialect, call: ClientCall, answers: Sequence[AnswerNode], request: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    if not request.get("stream"):
        return msgspec.json.encode(dialect.written(call, answers)), JSON
    return _lines(dialect.events(call, answers, request)), EVENTS


def _lines(events: Iterable[tuple[str | None, Any]]) -> bytes:
    """Returns the events in the format in which they are sent."""
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(b"event: " + name.encode())
        lines += [b"data: " + (data.encode() if isinstance(data, str) else msgspec.json.encode(data)), b""]
    return b"\n".join([*lines, b""])


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [_model("policy")]}


def _model(name: str) -> dict[str, Any]:
    """Describes a model of any name, since any name can be called."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rllm-core"}

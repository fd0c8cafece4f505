"""HTTP server: passes requests to a handler, and reports when a client has received its answer or is gone."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from rllm_gateway.response import KEEP_ALIVE_SECONDS, MAX_BODY_BYTES, Response

Handle = Callable[[str, str, Mapping[str, str], bytes | None], Awaitable[Response]]


class Server:
    """An HTTP server on a free port of the loopback interface.

    aiohttp cancels the handler when its client hangs up, and does not touch the process's signal handlers.

    Args:
        handle: Answers a request, given its method, path, headers with lower-case names, and body.
        unix_socket: Whether to serve on a Unix socket as well.

    Attributes:
        port: The server's port, once it is open.
        socket: Path of the server's Unix socket, once it is open; "" without one. Only this user can reach it.
    """

    def __init__(self, handle: Handle, *, unix_socket: bool = False) -> None:
        self.port = 0
        self.socket = ""
        self._has_socket = unix_socket
        self._folder = ""
        self._handle = handle
        self._runner: web.ServerRunner | None = None

    async def open(self) -> None:
        """Starts listening."""
        self._runner = web.ServerRunner(
            web.Server(self._answer, access_log=None, handler_cancellation=True),
            handle_signals=False,
            shutdown_timeout=1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        if self._has_socket:
            self._folder = tempfile.mkdtemp(prefix="rllm-gateway-")  # readable by this user only
            self.socket = f"{self._folder}/gateway.sock"
            await web.UnixSite(self._runner, self.socket).start()

    async def close(self) -> None:
        """Stops listening, and cancels running requests."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._folder:
            shutil.rmtree(self._folder)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        response = await self._handle(request.method, request.path, headers, await self._body(request))
        connection = request.transport
        if connection is None:
            raise ConnectionResetError("the client is gone")
        response.sending.add(connection)
        try:
            if response.rest is not None:
                return await self._in_pieces(request, response, response.rest)
            sent = web.Response(status=response.status, body=response.body, headers=response.headers)
            await sent.prepare(request)
            await sent.write_eof()
        finally:
            response.sending.discard(connection)
        response.delivered()
        return sent

    @staticmethod
    async def _body(request: web.BaseRequest) -> bytes | None:
        """Returns the body, or None if it is too large; the rest of such a body is not read."""
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return None
        request._client_max_size = MAX_BODY_BYTES  # limit for bodies without a declared length
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            return None
        except web.RequestPayloadError:  # such as broken gzip; the handler refuses an empty body
            return b""

    @staticmethod
    async def _in_pieces(request: web.BaseRequest, begun: Response, rest: asyncio.Task[Response]) -> web.StreamResponse:
        """Sends comments at intervals until the rest of the response is ready."""
        sent = web.StreamResponse(status=begun.status, headers=begun.headers)
        try:
            await sent.prepare(request)
            while not rest.done():
                await sent.write(begun.body)
                await asyncio.wait([rest], timeout=KEEP_ALIVE_SECONDS)
            response = rest.result()
            await sent.write(response.body)
            await sent.write_eof()
        finally:
            rest.cancel()
        response.delivered()
        return sent

"""HTTP: hands requests to a function, and tells it when a client has got its answer or is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from rllm_gateway.gateway import Response

MAX_BODY_BYTES = 64 << 20

Handle = Callable[[str, str, Mapping[str, str], bytes], Awaitable["Response"]]


class Server:
    """An HTTP server on a free port of the loopback interface.

    aiohttp cancels the handler when its client hangs up, and leaves the signals of the process alone.

    Args:
        handle: Answers a request, given by method, path, headers with lower-case names, and body.

    Attributes:
        port: Its port, once it is open.
    """

    def __init__(self, handle: Handle) -> None:
        self.port = 0
        self._handle = handle
        self._runner: web.ServerRunner | None = None

    async def open(self) -> None:
        """Starts to listen."""
        self._runner = web.ServerRunner(
            web.Server(self._answer, access_log=None, handler_cancellation=True),
            handle_signals=False,
            shutdown_timeout=1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stops to listen, and cancels what is running."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return web.Response(status=413, text=f"a body may have at most {MAX_BODY_BYTES} bytes")
        request._client_max_size = MAX_BODY_BYTES  # bodies without a length
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        response = await self._handle(request.method, request.path, headers, body)
        sent = web.Response(status=response.status, body=response.body, headers=response.headers)
        await sent.prepare(request)
        await sent.write_eof()
        response.delivered()
        return sent

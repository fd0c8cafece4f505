"""Process, session and restarts of an MCP server. Imports the SDK, so `rllm_workflows.mcp_tools` imports it late."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any, TextIO

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)

from rllm_core.errors import ConfigError
from rllm_workflows.mcp_settings import McpServer, ToolResult, ToolServerError

MAX_RESULT_CHARACTERS = 20_000
MAX_TOOL_PAGES = 100
STOP_TIMEOUT_SECONDS = 15.0  # The SDK takes up to 7 s to ask, terminate and kill.
_KEPT_BYTES, _SHOWN_CHARACTERS = 8192, 500


class Server:
    """A named server, connected on first use and reconnected after a failure.

    A process that missed a deadline gets no further calls. It is stopped once its remaining calls end, so that one slow
    call does not fail the others.
    """

    def __init__(self, name: str, config: McpServer) -> None:
        self.name = name
        self.config = config
        self._slots = asyncio.Semaphore(config.max_concurrent_calls)
        self._connecting = asyncio.Lock()
        self._current: _Connection | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    async def list_tools(self) -> list[Mapping[str, Any]]:
        """Returns ``name``, ``description`` and ``parameters`` (JSON schema) of each tool."""
        connection = await self._connected()
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self.config.start_timeout_seconds):
                for _ in range(MAX_TOOL_PAGES):
                    page = await connection.client.list_tools(cursor=cursor)
                    found += [
                        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                        for tool in page.tools
                    ]
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
        except TimeoutError:
            raise ToolServerError(
                f"MCP server {self.name!r} did not list its tools within {self.config.start_timeout_seconds:g} s"
            ) from None
        except MCPError as error:
            raise ToolServerError(
                f"MCP server {self.name!r} did not list its tools: {error}{connection.last_words()}"
            ) from error
        raise ToolServerError(f"MCP server {self.name!r} lists its tools in more than {MAX_TOOL_PAGES} pages")

    async def call(self, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> ToolResult:
        """Calls a tool of this server.

        Raises:
            ToolServerError: If the server died, missed the deadline, or violated the protocol.
        """
        seconds = self.config.call_timeout_seconds
        sent: Any = dict(meta)
        async with self._slots:
            connection = await self._connected()
            connection.calls += 1
            try:
                async with asyncio.timeout(seconds):
                    return _shown(await connection.client.call_tool(tool, dict(arguments), meta=sent))
            except TimeoutError:
                connection.is_failed = True
                raise ToolServerError(
                    f"MCP server {self.name!r} did not answer {tool!r} within {seconds:g} s and is being restarted"
                ) from None
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    return ToolResult("error: the arguments do not fit the tool", is_error=True)
                if error.code != CONNECTION_CLOSED:
                    raise ToolServerError(f"MCP server {self.name!r} failed in {tool!r}: {error}") from error
                connection.is_failed = True
                raise ToolServerError(
                    f"MCP server {self.name!r} exited during {tool!r} and is being restarted{connection.last_words()}"
                ) from error
            except (ValueError, RuntimeError) as error:  # The SDK's errors for invalid results.
                raise ToolServerError(f"MCP server {self.name!r} violated the protocol in {tool!r}: {error}") from error
            finally:
                connection.calls -= 1
                if connection.is_failed:
                    self._retire(connection)

    async def stop(self) -> None:
        """Stops the server permanently; pending calls get no answer.

        Raises:
            ToolServerError: If a process could not be stopped in time.
        """
        self._is_stopped = True
        async with self._connecting:
            if self._current is not None:
                self._end(self._current)
                self._current = None
        while running := [task for task in self._ending if not task.done()]:
            await asyncio.wait(running)
        for task in self._ending:
            task.result()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._is_stopped:
                raise ToolServerError(f"MCP server {self.name!r} was stopped")
            if self._current is None:
                connection = _Connection(self.name, self.config)
                try:
                    await connection.start()
                except BaseException:
                    self._end(connection)
                    raise
                self._current = connection
            return self._current

    def _retire(self, connection: _Connection) -> None:
        if self._current is connection:
            self._current = None
        if connection.calls == 0:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.stop())
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._ending.discard(task)  # failed tasks stay, so that `stop` raises their errors


class _Connection:
    """A process and its session. One task opens and closes both, as the SDK requires.

    Attributes:
        client: Client of the SDK, once started.
        calls: Number of pending calls.
        is_failed: Whether the process failed, so that it gets no further calls.
    """

    client: Client

    def __init__(self, name: str, config: McpServer) -> None:
        self.name = name
        self.config = config
        self.calls = 0
        self.is_failed = False
        self._stderr = _Tail()
        self._secrets: dict[str, str] = {}
        self._is_started = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process and initializes the session.

        Raises:
            ConfigError: If an environment variable is not set.
            ToolServerError: If the process cannot be started or does not speak the protocol.
        """
        missing = [name for name in self.config.pass_environment if name not in os.environ]
        if missing:
            raise ConfigError(f"MCP server {self.name!r} needs the environment variable {missing[0]}, which is not set")
        self._secrets = {name: os.environ[name] for name in self.config.pass_environment}
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(started))
        what = f"MCP server {self.name!r} ({self.config.command[0]})"
        try:
            async with asyncio.timeout(self.config.start_timeout_seconds):
                await started
            self._is_started = True
        except TimeoutError:
            raise ToolServerError(
                f"{what} did not start within {self.config.start_timeout_seconds:g} s{self.last_words()}"
            ) from None
        except (OSError, MCPError, RuntimeError, ValueError) as error:
            raise ToolServerError(f"{what} did not start: {error}{self.last_words()}") from error

    async def stop(self) -> None:
        """Ends the session and the process."""
        if self._task is None:
            return
        if self._is_started:
            self._stopping.set()
        else:
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_SECONDS)
        if not done:
            self._task.cancel()
            raise ToolServerError(f"MCP server {self.name!r} did not stop within {STOP_TIMEOUT_SECONDS:g} s")
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise ToolServerError(f"MCP server {self.name!r} failed with {type(error).__name__}: {error}") from error

    def last_words(self) -> str:
        """Returns the end of the process's stderr, with the values of passed environment variables masked."""
        said = bytes(self._stderr.kept).decode(errors="replace")
        for name, value in self._secrets.items():
            if value:
                said = said.replace(value, f"[{name}]")
        said = " ".join(said.split())[-_SHOWN_CHARACTERS:]
        return f"; its stderr: {said}" if said else ""

    async def _live(self, started: asyncio.Future[None]) -> None:
        program, *arguments = self.config.command
        try:
            with tempfile.TemporaryDirectory(prefix="rllm-mcp-") as folder:
                params = StdioServerParameters(command=program, args=arguments, env=self._secrets, cwd=folder)
                stderr = await self._stderr.opened()
                try:
                    async with Client(stdio_client(params, errlog=stderr), cache=None) as self.client:
                        stderr.close()  # The process has its own copy.
                        if not started.done():
                            started.set_result(None)
                        await self._stopping.wait()
                finally:
                    stderr.close()
                    self._stderr.close()
        except Exception as error:
            if started.done():
                raise
            while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:  # Raised by the SDK's task groups.
                [error] = error.exceptions
            started.set_exception(error)


class _Tail(asyncio.Protocol):
    """Keeps the last bytes from a pipe."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    async def opened(self) -> TextIO:
        """Opens the pipe and returns its writing end."""
        reading, writing = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: self, os.fdopen(reading, "rb", buffering=0)
        )
        return os.fdopen(writing, "w")

    def data_received(self, data: bytes) -> None:
        """Keeps the end of the data."""
        self.kept += data
        del self.kept[:-_KEPT_BYTES]

    def close(self) -> None:
        """Stops reading."""
        if self._transport is not None:
            self._transport.close()


def _shown(result: CallToolResult) -> ToolResult:
    """Converts a result to text; content other than text is named, not shown."""
    parts = []
    for content in result.content:
        match content:
            case TextContent(text=text) | EmbeddedResource(resource=TextResourceContents(text=text)):
                parts.append(text)
            case ImageContent(mime_type=kind) | AudioContent(mime_type=kind):
                parts.append(f"[{content.type}: {kind}, not shown]")
            case _:
                parts.append(f"[{content.type}, not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if len(text) > MAX_RESULT_CHARACTERS:
        text = f"{text[:MAX_RESULT_CHARACTERS]}\n[cut: {len(text)} characters]"
    return ToolResult(text, is_error=result.is_error)

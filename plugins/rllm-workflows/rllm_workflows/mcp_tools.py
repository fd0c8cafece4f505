"""Tools of MCP servers for any workflow, configured in the run file and started once per run.

    class MyConfig(WorkflowConfig):
        servers: Annotated[McpServers, Field(description="...")] = {}

    class MyWorkflow(Workflow):
        async def open(self):
            self.tools = McpTools(self.config.servers)
            await self.tools.open()

        async def close(self):
            await self.tools.close()

        async def run(self, task, completer):
            step = await completer.complete(messages, tools=self.tools.specs)
            ...
            result = await self.tools.call(name, arguments, meta={ROLLOUT_SEED: seed})

`McpTools.open` needs the extra ``rllm-workflows[mcp]``; importing this module does not.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rllm_core.errors import ConfigError
from rllm_core.parser import ToolSpec
from rllm_core.scope import timed
from rllm_workflows.mcp_settings import McpServer as McpServer
from rllm_workflows.mcp_settings import McpServers as McpServers
from rllm_workflows.mcp_settings import ToolResult as ToolResult
from rllm_workflows.mcp_settings import ToolServerError as ToolServerError

if TYPE_CHECKING:
    from rllm_workflows.mcp_server import Server

ROLLOUT_SEED = "rllm-core/rollout-seed"
"""Key of a call's ``meta`` for the rollout's seed. Servers read it from ``_meta``; the model neither sees nor sets
it."""

MAX_NAME_CHARACTERS = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class McpTools:
    """The combined tools of several servers.

    A tool keeps its server's name for it, with ``_`` in place of characters that some model formats do not allow
    (anything but letters, digits, ``_`` and ``-``). If several servers have a tool of the same name, each becomes
    ``SERVER__TOOL``. Names thus depend only on the servers in the run file, not on their order.

    `open` starts the servers and `close` stops them. Each runs in its own empty temporary folder. If a server dies or
    misses a deadline, its calls fail with `ToolServerError`, and the next call restarts it.

    Args:
        servers: Server settings by name.
    """

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self._config = dict(servers)
        self._servers: dict[str, Server] = {}
        self._tools: dict[str, tuple[Server, str]] = {}
        self.specs: Sequence[ToolSpec] = ()

    async def open(self) -> None:
        """Starts all servers and lists their tools.

        Raises:
            ConfigError: If the extra is not installed, a server cannot be started, or two tools share a name.
        """
        try:
            from rllm_workflows.mcp_server import Server
        except ModuleNotFoundError as error:
            if error.name != "mcp":
                raise
            raise ConfigError("MCP tools need the MCP SDK: pip install 'rllm-workflows[mcp]'") from error
        self._servers, self._tools = {name: Server(name, config) for name, config in self._config.items()}, {}
        listed = await asyncio.gather(*map(_list_tools, self._servers.values()), return_exceptions=True)
        found: list[tuple[Server, str, Mapping[str, Any]]] = []
        for server, tools in zip(self._servers.values(), listed, strict=True):
            if isinstance(tools, BaseException):
                raise tools
            found += [(server, _NOT_IN_NAMES.sub("_", tool["name"]), tool) for tool in tools]
        owners = Counter(short for _, short, _ in found)
        specs: list[ToolSpec] = []
        for server, short, tool in found:
            name = short if owners[short] == 1 else f"{server.name}__{short}"
            if len(name) > MAX_NAME_CHARACTERS:
                raise ConfigError(
                    f"MCP server {server.name!r}: the tool name {name!r} has {len(name)} characters; model formats "
                    f"allow at most {MAX_NAME_CHARACTERS}"
                )
            if name in self._tools:
                first, first_tool = self._tools[name]
                raise ConfigError(
                    f"two tools are named {name!r}: {first_tool!r} of MCP server {first.name!r} and "
                    f"{tool['name']!r} of {server.name!r}"
                )
            self._tools[name] = server, tool["name"]
            function = {"name": name, "description": tool["description"], "parameters": tool["parameters"]}
            specs.append({"type": "function", "function": function})
        self.specs = tuple(specs)

    async def close(self) -> None:
        """Stops all servers.

        Raises:
            ToolServerError: If a server could not be stopped; the others are stopped anyway.
        """
        servers, self._servers = list(self._servers.values()), {}
        self._tools, self.specs = {}, ()
        for problem in await asyncio.gather(*(server.stop() for server in servers), return_exceptions=True):
            if problem is not None:
                raise problem

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> ToolResult:
        """Calls a tool. Calls may run concurrently.

        Args:
            name: Name of the tool, as the model wrote it.
            arguments: Arguments, as the model wrote them. The server checks them.
            meta: Metadata for the server, invisible to the model (see `ROLLOUT_SEED`).

        Raises:
            ToolServerError: If the server died, missed the deadline, or violated the protocol.
        """
        if not self._servers:
            raise RuntimeError("the MCP servers are not running: await McpTools.open() first")
        found = self._tools.get(name)
        if found is None:
            return ToolResult("error: no such tool", is_error=True)
        server, tool = found
        with timed("tool", name):
            return await server.call(tool, arguments, meta or {})


async def _list_tools(server: Server) -> list[Mapping[str, Any]]:
    try:
        return await server.list_tools()
    except ToolServerError as error:
        raise ConfigError(str(error)) from error

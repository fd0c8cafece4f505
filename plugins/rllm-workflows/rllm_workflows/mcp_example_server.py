"""The tools of ``calculator`` as MCP servers, for examples and tests.

    python -m rllm_workflows.mcp_example_server sums

``sums`` has ``add`` and ``sub``, ``products`` has ``mul``. Both have ``about``, to demonstrate a name clash. The seed
in a call's ``_meta`` sets the offset of the display, the same on both servers. The model sees neither.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError as AnswerError
from mcp.types import INVALID_REQUEST

from rllm_workflows.calculator import TOOLS, Calculator, ToolError
from rllm_workflows.mcp_tools import ROLLOUT_SEED

SERVERS = {"sums": ("add", "sub"), "products": ("mul",)}
_WORDS = {tool: word for word, tool in TOOLS.items()}


def make_server(kind: str) -> MCPServer:
    """Creates a server of the given kind, a key of `SERVERS`."""
    server = MCPServer(f"calculator-{kind}")
    for name in SERVERS[kind]:
        server.tool(name, description=f"Calculates a {_WORDS[name]} b and returns what the display shows.")(_tool(name))

    @server.tool()
    def about() -> str:
        """Says which tools this server has, and the process it runs in."""
        return f"{', '.join(SERVERS[kind])} in process {os.getpid()}"

    return server


def _tool(name: str) -> Any:
    def calculate(a: int, b: int, context: Context) -> str:
        meta: dict[str, Any] = dict(context.request_context.meta or {})
        seed = meta.get(ROLLOUT_SEED)
        if not isinstance(seed, int):
            raise MCPError(INVALID_REQUEST, f"a call needs {ROLLOUT_SEED} in its _meta")
        try:
            return Calculator(seed).call(name, {"a": a, "b": b})
        except ToolError as error:
            raise AnswerError(str(error)) from None

    return calculate


def main() -> None:
    """Serves over standard input and output until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(SERVERS))
    make_server(parser.parse_args().kind).run("stdio")


if __name__ == "__main__":
    main()

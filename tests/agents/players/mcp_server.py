"""Serves the tools by the Model Context Protocol, over standard input and output."""

from __future__ import annotations

from arithmetic import TOOLS
from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")
for tool in TOOLS.values():
    server.add_tool(tool)
server.run()

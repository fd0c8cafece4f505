"""A harness for verifiers: a chat loop in this process.

verifiers' own harnesses are programs, which it installs with ``uv sync`` and starts once per rollout. But its contract
for `Harness.launch` only requires every model call to go through the given endpoint, not that a program makes it.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

MAX_DETAIL = 2000
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # the rollout has its own


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Calls the model, executes its tool calls, and ends with its first answer without a call.

    It answers wrong calls with the same texts as verifiers' harness ``null``.
    """

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_TOOL_INTERCEPTION: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Runs one segment of the conversation; see `verifiers.v1.Harness.launch`."""
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            aiohttp.ClientSession(headers=headers, timeout=NO_TIMEOUT) as session,
        ):
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools: list[Any] = []
            dispatch: dict[str, tuple[str, str]] = {}
            connections: dict[str, Any] = {}
            if servers:
                tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            messages = self._begun(data)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with session.post(f"{endpoint}/chat/completions", json=body) as reply:
                    if reply.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=(await reply.text())[:MAX_DETAIL])
                    message = (await reply.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    denied = await _denied(session, tool_interception_url, call)
                    messages.append(denied or await _called(connections, dispatch, call))

    def _begun(self, data: Any) -> list[dict[str, Any]]:
        """Returns the messages that the task starts with."""
        system, prompt = self.resolve_prompt(data)
        begun = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*begun, {"role": "user", "content": prompt}]
        return [*begun, *(message_to_wire(message) for message in prompt or ())]


async def _denied(session: aiohttp.ClientSession, url: str | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Asks the task whether a call may run; if not, returns the result to use instead."""
    if url is None:
        return None
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError:
        arguments = function["arguments"]
    asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
    async with session.post(url, json=asked, raise_for_status=True) as reply:
        decision = await reply.json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    return bound_tool_message(decision["message"]) if decision["action"] == "deny" else None


async def _called(connections: dict[str, Any], dispatch: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """Calls a tool, and returns its result as a message."""
    name = call["function"]["name"]
    content: Any
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (json.JSONDecodeError, RecursionError) as error:
        content = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    else:
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            content = f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
        elif name not in dispatch:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    said = {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}
    bounded: dict[str, Any] = bound_tool_message(said)
    return bounded

"""Agents of openai-agents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.mcp import MCPServerStdio
from arithmetic import INSTRUCTIONS, TOOLS
from openai import AsyncOpenAI

set_tracing_disabled(True)
MCP_SERVER = Path(__file__).with_name("mcp_server.py")


def _agent(model: Model) -> Agent[Any]:
    return Agent("calculator", instructions=INSTRUCTIONS, tools=[*map(function_tool, TOOLS.values())], model=model)


async def chat(question: str, base_url: str, api_key: str) -> str:
    """Over chat completions."""
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    return (await Runner.run(_agent(model), question)).final_output


async def chat_streamed(question: str, base_url: str, api_key: str) -> str:
    """Over streamed chat completions."""
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    return await _streamed(model, question)


async def responses(question: str, base_url: str, api_key: str) -> str:
    """Over Responses."""
    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    return (await Runner.run(_agent(model), question)).final_output


async def responses_streamed(question: str, base_url: str, api_key: str) -> str:
    """Over streamed Responses."""
    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    return await _streamed(model, question)


async def _streamed(model: Model, question: str) -> str:
    running = Runner.run_streamed(_agent(model), question)
    async for _ in running.stream_events():
        pass
    return running.final_output


async def with_mcp(question: str, base_url: str, api_key: str) -> str:
    """With the tools of an MCP server, which it starts."""
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    async with MCPServerStdio({"command": sys.executable, "args": [str(MCP_SERVER)]}) as server:
        agent = Agent("calculator", instructions=INSTRUCTIONS, mcp_servers=[server], model=model)
        return (await Runner.run(agent, question)).final_output


async def hands_over(question: str, base_url: str, api_key: str) -> str:
    """Hands the conversation to another agent, with other instructions and tools."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    calculator = _agent(OpenAIChatCompletionsModel("calculator", client))
    first = Agent("first", handoffs=[calculator], model=OpenAIChatCompletionsModel("first", client))
    return (await Runner.run(first, question)).final_output


async def asks_another(question: str, base_url: str, api_key: str) -> str:
    """Has another agent as a tool, and asks it twice at once."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    tool = _agent(OpenAIChatCompletionsModel("calculator", client)).as_tool("calculate", "Calculates.")
    first = Agent("first", tools=[tool], model=OpenAIChatCompletionsModel("first", client))
    return (await Runner.run(first, question)).final_output

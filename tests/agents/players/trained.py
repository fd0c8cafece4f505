"""An agent of openai-agents that one file holds, as it is trained in worker processes."""

from __future__ import annotations

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


def add(a: int, b: int) -> str:
    """Calculates a plus b."""
    return str(a + b)


def mul(a: int, b: int) -> str:
    """Calculates a times b."""
    return str(a * b)


def sub(a: int, b: int) -> str:
    """Calculates a minus b."""
    return str(a - b)


async def solve(question: str, base_url: str, api_key: str) -> str:
    """Plays up to three turns."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        # The starter model knows the tools, and descriptions confuse it.
        hidden = ModelSettings(tool_choice="none")
        tools = [function_tool(tool) for tool in (add, mul, sub)]
        agent = Agent("calculator", tools=tools, model=model, model_settings=hidden, reset_tool_choice=False)
        try:
            return (await Runner.run(agent, question, max_turns=3)).final_output
        except AgentsException as error:  # too many turns, or a tool that there is not
            return f"{type(error).__name__}"

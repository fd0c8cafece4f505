"""Agents of pydantic-ai."""

from __future__ import annotations

from arithmetic import INSTRUCTIONS, TOOLS
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def _agent(model: Model) -> Agent[None, str]:
    return Agent(model, instructions=INSTRUCTIONS, tools=list(TOOLS.values()))


async def chat(question: str, base_url: str, api_key: str) -> str:
    """Over chat completions."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    return (await _agent(OpenAIChatModel("policy", provider=provider)).run(question)).output


async def chat_streamed(question: str, base_url: str, api_key: str) -> str:
    """Over streamed chat completions; `run_stream` takes the first text for the answer."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    async with _agent(OpenAIChatModel("policy", provider=provider)).run_stream(question) as running:
        return await running.get_output()


async def responses(question: str, base_url: str, api_key: str) -> str:
    """Over Responses."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    return (await _agent(OpenAIResponsesModel("policy", provider=provider)).run(question)).output


async def anthropic(question: str, anthropic_base_url: str, api_key: str) -> str:
    """Over Messages."""
    provider = AnthropicProvider(base_url=anthropic_base_url, api_key=api_key)
    return (await _agent(AnthropicModel("policy", provider=provider)).run(question)).output

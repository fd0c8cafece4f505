"""Agents of smolagents, which are functions that block."""

from __future__ import annotations

from typing import Any

from arithmetic import TOOLS
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


def calls_tools(question: str, base_url: str, api_key: str) -> str:
    """Calls tools, and writes them into its history as text."""
    return _ask(ToolCallingAgent, question, base_url, api_key)


def writes_code(question: str, base_url: str, api_key: str) -> str:
    """Writes code, which ends at a stop text."""
    return _ask(CodeAgent, question, base_url, api_key)


def _ask(kind: Any, question: str, base_url: str, api_key: str) -> str:
    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = kind(tools=[tool(one) for one in TOOLS.values()], model=model, max_steps=4, verbosity_level=0)
    return str(agent.run(question))

"""Graphs of langgraph."""

from __future__ import annotations

from typing import Any

from arithmetic import INSTRUCTIONS, TOOLS
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


async def whole(question: str, base_url: str, api_key: str) -> str:
    """Over chat completions."""
    return await _ask(question, ChatOpenAI(model="policy", base_url=base_url, api_key=api_key), prompt=INSTRUCTIONS)


async def streamed(question: str, base_url: str, api_key: str) -> str:
    """Over streamed chat completions."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, streaming=True)
    return await _ask(question, model, prompt=INSTRUCTIONS)


async def compacting(question: str, base_url: str, api_key: str) -> str:
    """Sends a summary in place of everything but the last results."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    return await _ask(question, model, pre_model_hook=_compacted)


def _compacted(state: dict[str, Any]) -> dict[str, Any]:
    messages = state["messages"]
    if len(messages) == 1:
        return {"llm_input_messages": messages}
    results = [message.content for message in messages if message.type == "tool"]
    return {"llm_input_messages": [("user", f"{messages[0].content}; the tools said {', '.join(results)}")]}


async def _ask(question: str, model: ChatOpenAI, **options: Any) -> str:
    graph = create_react_agent(model, list(TOOLS.values()), **options)
    state = await graph.ainvoke({"messages": [("user", question)]})
    return state["messages"][-1].content

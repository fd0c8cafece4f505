"""Loops that people write themselves, with OpenAI's and Anthropic's SDKs and with LiteLLM."""

from __future__ import annotations

import json
from typing import Any

from arithmetic import SCHEMAS, TOOLS

MAX_CALLS = 6


async def openai_sdk(question: str, base_url: str, api_key: str) -> str:
    """Sends the SDK's own objects back."""
    import openai

    messages: list[Any] = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS)
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                said = TOOLS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return "too many calls"


async def anthropic_sdk(question: str, anthropic_base_url: str, api_key: str) -> str:
    """Streams, and asks for thinking."""
    import anthropic

    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]}  # type: ignore[index]
        for one in SCHEMAS
    ]
    messages: list[Any] = [{"role": "user", "content": question}]
    async with anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key) as client:
        for _ in range(MAX_CALLS):
            asked: dict[str, Any] = {"model": "policy", "max_tokens": 2000, "messages": messages, "tools": tools}
            async with client.messages.stream(thinking={"type": "enabled", "budget_tokens": 1024}, **asked) as stream:
                message = await stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return message.content[-1].text
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": TOOLS[call.name](**call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    return "too many calls"


async def litellm(question: str, base_url: str, api_key: str) -> str:
    """Names the tool in its results."""
    import litellm

    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        completion = await litellm.acompletion(
            model="openai/policy", api_base=base_url, api_key=api_key, messages=messages, tools=SCHEMAS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            name = call.function.name
            said = TOOLS[name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": name, "content": said})
    return "too many calls"

"""An agent whose calculator's display is off. It executes what the model calls, and does not know of training."""

import json
import operator
import random

import aiohttp


async def play(question: str, base_url: str) -> list[dict]:
    messages, offset = [{"role": "user", "content": question}], random.randrange(90)
    async with aiohttp.ClientSession() as session:
        for _ in range(4):
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                [choice] = (await response.json())["choices"]
            messages.append(choice["message"])
            if len(calls := choice["message"].get("tool_calls", ())) != 1 or choice["finish_reason"] == "length":
                break
            called, shown = calls[0]["function"], "error: the arguments are a and b"
            match called["name"], json.loads(called["arguments"]):
                case "add" | "sub" | "mul" as name, {"a": int(a), "b": int(b), **others} if not others:
                    shown = str(10 + (getattr(operator, name)(a, b) + offset) % 90)
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": shown})
    return [*messages[1:], {"finish_reason": choice["finish_reason"]}]

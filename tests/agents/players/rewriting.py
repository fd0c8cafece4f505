"""A program that knows only its environment, and writes all history anew: ids, spacing, parts; without reasoning."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from arithmetic import SCHEMAS, TOOLS

client = openai.OpenAI()
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
while True:
    answer = client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS).choices[0].message
    calls = [
        {
            "id": f"mine_{len(messages)}_{index}",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": json.dumps(json.loads(call.function.arguments), indent=1, sort_keys=True),
            },
        }
        for index, call in enumerate(answer.tool_calls or ())
    ]
    parts = [{"type": "text", "text": (answer.content or "").strip()}]
    messages.append({"role": "assistant", "content": parts, "tool_calls": calls or None})
    if not calls:
        print(answer.content)
        break
    for call in calls:
        said = TOOLS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))  # type: ignore[index]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": said}]})

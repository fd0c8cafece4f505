"""Tests that no body, however malformed, is more than the agent's own mistake."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from conftest import TOOLS, Policy, rollout, said
from rllm_gateway.gateway import DIALECTS

CALLING = said("see", "hm", ("add", {"a": 1}))
JUNK: list[Any] = [
    None, True, 0, -1, 3.5, 10**30, 1e308, float("nan"), "", "x", "\ud800", "\x00", "data:,", "auto", [], [[]], [None],
    ["a"] * 20, {}, {"type": "text"}, {"role": "user"}, {"type": "image_url", "image_url": {}}, {"type": "tool_use"},
    {"type": "reasoning"},
]  # fmt: skip
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m", "n": 1, "stream": False, "stop": ["\n"], "max_tokens": 5, "tools": TOOLS, "tool_choice": "auto",
        "logprobs": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"},
        "messages": [
            {"role": "system", "content": "be good"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
    },
    "responses": {
        "model": "m", "instructions": "be good", "stream": False, "max_output_tokens": 5, "include": [],
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "text": {"format": {"type": "text"}},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
    },
    "messages": {
        "model": "m", "max_tokens": 5, "stream": False, "system": [{"type": "text", "text": "be good"}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["\n"],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ],
    },
}  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 4])):
        container, key = rng.choice(places(body))
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        if not places(body):
            break
    content = json.dumps(body).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(content))
        content = content[:at] + rng.choice([b"", b"\xff", b"}", b"[", b"\x00"]) + content[at + rng.randrange(3) :]
    return content


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("seed", range(4))
async def test_a_malformed_body_is_answered_or_refused(path: str, seed: int) -> None:
    rng = random.Random(seed)
    statuses = set()
    async with rollout(Policy(lambda prompt, seed: CALLING)) as client:
        for _ in range(250):
            content = mutated(BODIES[path], rng)
            response = await client.post(content, path)
            assert client.endpoint.failure is None, (content, response.body)
            statuses.add(response.status)
    assert statuses == {200, 400}

"""Tests that a body which repeats an earlier one is read as if it were the first."""

from __future__ import annotations

import copy
import json
import random
from types import ModuleType
from typing import Any

import pytest
from rllm_gateway import messages as messages_module
from rllm_gateway.bodies import KEPT_BODIES, Bodies, Read
from rllm_gateway.dialects import anthropic, chat, responses
from rllm_gateway.errors import BadRequest

WORDS = ["a", "ünï", '"messages":[', "]}", ',{"role":"user"}', "\\", "\n", '"input":[{}]', " "]


def item(dialect: ModuleType, rng: random.Random, role: str) -> Any:
    """A message, or an item of the Responses."""
    text = "".join(rng.choices(WORDS, k=rng.randrange(5)))
    if dialect is responses and role == "tool":
        return {"type": "function_call_output", "call_id": "c1", "output": text}
    if dialect is responses and role == "call":
        return {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    if role == "call":
        role = "assistant"
    if role == "tool":
        if dialect is anthropic:
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": text}]}
        return {"role": "tool", "tool_call_id": "c1", "content": text}
    return {"role": role, "content": text}


def written(body: dict[str, Any], rng: random.Random) -> bytes:
    """JSON in one of several styles."""
    style: dict[str, Any] = rng.choice([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
    return json.dumps(body, **style).encode()


def changed(dialect: ModuleType, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The next body of an agent, which mostly adds something to its conversation."""
    name, body = dialect.FORM.name, copy.deepcopy(body)
    match rng.randrange(10):
        case 0:
            body[name] = body[name][: rng.randrange(1, len(body[name]) + 1)]
        case 1:
            body[name][rng.randrange(len(body[name]))] = item(dialect, rng, "user")
        case 2:
            body["system" if dialect is anthropic else "instructions"] = rng.choice(WORDS)
        case 3:
            body = dict(rng.sample(list(body.items()), len(body)))
        case 4:
            body["metadata"] = {name: body[name]}
        case 5:
            body["temperature"] = rng.random()
        case _:
            for role in rng.choice([["call", "tool"], ["assistant", "user"], ["call", "call", "tool", "tool", "user"]]):
                body[name].append(item(dialect, rng, role))
    return body


def as_data(read: Read) -> Any:
    return read.fields, read.history.since(0), read.history.digest, read.digest


@pytest.mark.parametrize("dialect", [chat, responses, anthropic])
@pytest.mark.parametrize("seed", range(30))
def test_bodies_mean_the_same_after_others(dialect: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    bodies = Bodies()
    sent = [{"model": "m", dialect.FORM.name: [item(dialect, rng, "user")], "tools": []}]
    for _ in range(60):
        sent.append(changed(dialect, rng.choice(sent[-3:]), rng))
        content = written(sent[-1], rng)
        assert as_data(bodies.read(dialect.FORM, content)) == as_data(Bodies().read(dialect.FORM, content))
    assert len(bodies._known) <= KEPT_BODIES


def test_a_turn_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    chained = messages_module.chained
    monkeypatch.setattr("rllm_gateway.history.chained", lambda *args: hashed.append(args) or chained(*args))
    bodies, messages = Bodies(), [{"role": "user", "content": "0"}]
    for turn in range(1, 50):
        hashed.clear()
        bodies.read(chat.FORM, json.dumps({"model": "m", "messages": messages, "n": 1}).encode())
        assert len(hashed) == (1 if turn == 1 else 2)
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": str(turn)}]
    assert len(bodies._known) == 1


@pytest.mark.parametrize("end", [b'{"role":"user"', b"garbage", b",]}", b"]}}", b"", b"]", b',{"role":"robot"}]}'])
def test_a_broken_body_after_a_good_one_is_refused(end: bytes) -> None:
    bodies, start = Bodies(), b'{"model":"m","messages":[{"role":"user","content":"x"}'
    bodies.read(chat.FORM, start + b"]}")
    with pytest.raises(BadRequest):
        bodies.read(chat.FORM, start + end)
    assert len(bodies.read(chat.FORM, start + b',{"role":"user","content":"y"}]}').history) == 2

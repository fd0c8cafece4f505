"""A policy that reasons and calls tools, spelled as no tokenizer would, and clients of the gateway."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rllm_gateway import Endpoint, Gateway
from rllm_gateway.bodies import Bodies
from rllm_gateway.gateway import Response

from rllm_core.engine import TITOCompleter
from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination
from rllm_core.types import FinishReason, TokenOutput
from rllm_devkit.scripted import ByteParser, ScriptedEngine

os.environ["no_proxy"] = "*"
sys.path.insert(0, str(Path(__file__).parent))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs ``async def`` tests, each in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 600))
    return True


class CallParser(ByteParser):
    """Reads completions that are JSON: ``{"content": ..., "reasoning": ..., "calls": [[name, arguments], ...]}``."""

    supports_tools = True
    supports_bridge = True

    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        """See `BaseParser.parse_completion`."""
        plain = super().parse_completion(completion_ids, **more)
        try:
            said = json.loads(plain.content)
            calls = [ParsedToolCall(name, arguments, json.dumps(arguments)) for name, arguments in said["calls"]]
            content, reasoning = said["content"], said["reasoning"]
        except (ValueError, TypeError, KeyError):
            if plain.content.startswith("<think>"):  # reasoning that was cut off
                return ParsedCompletion("", plain.content.removeprefix("<think>"), (), plain.termination, False)
            return plain
        complete = None if reasoning is None else True
        return ParsedCompletion(content, reasoning, tuple(calls), Termination.STOP, complete)

    def render(self, messages: Any, **more: Any) -> list[int]:
        """See `BaseParser.render`; writes calls and reasoning, too."""
        return super().render([{"role": one["role"], "content": _written(one)} for one in messages], **more)


def _written(message: Any) -> str:
    more = {key: message[key] for key in ("reasoning_content", "tool_calls", "tool_call_id") if message.get(key)}
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return text + (json.dumps(more) if more else "")


def said(content: str = "", reasoning: str | None = None, *calls: tuple[str, Any]) -> str:
    """Returns a completion with oddly spaced JSON."""
    return json.dumps({"calls": calls, "reasoning": reasoning, "content": content}, indent=1)


class Policy(ScriptedEngine):
    """Says what a function of the prompt and the seed returns, one token per byte, and remembers what it was asked."""

    def __init__(self, answer: Callable[[str, int], str | Exception]) -> None:
        super().__init__(CallParser())
        self.asked: list[tuple[list[int], list[int]]] = []
        self.cancelled = 0
        self.hold: asyncio.Event | None = None
        self.fails: Exception | None = None
        self._answer = answer

    async def get_token_output_from_token_input(self, token_input: Any, *, sampling_params: Any, **more: Any) -> Any:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        prompt = [int(token) for token in token_input]
        said = self._answer(bytes(token for token in prompt if token < 256).decode(errors="replace"), more["seed"])
        if isinstance(said, Exception):
            raise said
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.fails is not None:
            raise self.fails
        ids = [*said.encode(), CallParser.END][: sampling_params.max_response_tokens]
        self.asked.append((prompt, ids))
        reason = FinishReason.STOP if ids[-1] == CallParser.END else FinishReason.LENGTH
        logprobs = -np.linspace(0.1, 1, len(ids), dtype=np.float32)
        return TokenOutput(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=0)


@asynccontextmanager
async def rollout(
    policy: Policy, *, seed: int = 3, gateway: Gateway | None = None, **options: Any
) -> AsyncIterator[Client]:
    """Opens a gateway with a server, and the endpoint of one rollout."""
    own = gateway or Gateway(**options)
    if gateway is None:
        await own.open()
    try:
        async with own.rollout(TITOCompleter(policy, seed=seed)) as endpoint:
            yield Client(own, endpoint)
    finally:
        if gateway is None:
            await own.close()


class Client:
    """Asks without HTTP."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self.gateway, self.endpoint = gateway, endpoint

    async def post(self, body: Any, path: str = "chat/completions", **headers: str) -> Response:
        """Posts a body."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        where = f"/r/{self.endpoint.api_key}/v1/{path}"
        given = {"host": "127.0.0.1:1"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.gateway.handle("POST", where, given, content)

    async def ask(self, messages: Sequence[Any], **body: Any) -> Any:
        """Returns the message of the answer, which the client has got."""
        response = await self.post({"model": "m", "messages": messages, **body})
        assert response.status == 200, response.body
        response.delivered()
        return json.loads(response.body)["choices"][0]["message"]


def check_exact(policy: Policy, endpoint: Endpoint) -> None:
    """Checks that every step has exactly the tokens that the engine was asked and gave."""
    steps = [step for trajectory in endpoint.trajectories() for step in trajectory.steps]
    assert steps
    for step in steps:
        assert (step.prompt_ids.tolist(), step.completion_ids.tolist()) in policy.asked


def read_by(dialect: Any, body: Any) -> Any:
    """Returns the call that a dialect reads in a request."""
    found = Bodies().read(dialect.FORM, msgspec.json.encode(body))
    return dialect.read(found.fields, found.history)

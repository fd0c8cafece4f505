"""Tests the gateway over HTTP: hang-ups, many calls at once, large bodies, and the real SDK."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from conftest import TOOLS, Client, Policy, check_exact, rollout, said
from rllm_gateway.response import MAX_BODY_BYTES

from rllm_core.algorithms.samples import segments
from rllm_core.engine import EngineError

USER = {"role": "user", "content": "what is 1+2?"}


def echo(prompt: str, seed: int) -> str:
    """An answer that shows its seed."""
    return f"answer {seed % 1_000_000_007}"


def calling(prompt: str, seed: int) -> str:
    """Calls two tools at once, then answers."""
    if "result" in prompt:
        return said("done é", "so")
    return said("let me see", "hm", ("add", {"a": 1, "b": 2}), ("add", {"b": 4, "a": 3}))


def sdk(client: Client) -> openai.AsyncOpenAI:
    """The SDK, as an agent makes it."""
    return openai.AsyncOpenAI(base_url=client.endpoint.base_url, api_key="anything")


async def eventually(condition: Any) -> None:
    """Waits until a condition holds."""
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_tools_is_one_segment(streamed: bool) -> None:
    policy = Policy(calling)
    async with rollout(policy) as client, sdk(client) as agent:
        messages: list[Any] = [USER]
        for _ in range(3):
            asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS}
            if streamed:
                async with agent.chat.completions.stream(**asked) as stream:
                    completion: Any = await stream.get_final_completion()
            else:
                completion = await agent.chat.completions.create(**asked)
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {call.id}"})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "more"})
        [trajectory] = client.endpoint.trajectories()
        assert segments(trajectory.steps) == [[0, 1, 2]]
        first = trajectory.steps[0].response
        for call in messages[1]["tool_calls"]:
            call.pop("index", None)
        assert messages[1]["tool_calls"] == [dict(call) for call in first["tool_calls"]]
        assert messages[1]["reasoning_content"] == "hm"
        check_exact(policy, client.endpoint)


async def test_a_client_that_hangs_up_cancels_the_sampling() -> None:
    policy = Policy(echo)
    policy.hold = asyncio.Event()
    async with rollout(policy) as client:
        async with aiohttp.ClientSession() as session:
            url = f"{client.endpoint.base_url}/chat/completions"
            asking = asyncio.create_task(session.post(url, json={"messages": [USER]}))
            await eventually(lambda: client.endpoint._running)
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
        await eventually(lambda: policy.cancelled == 1)
        policy.hold.set()
        again = await client.ask([USER])
        assert len(policy.asked) == 1
        assert [step.text for one in client.endpoint.trajectories() for step in one.steps] == [again["content"]]


async def test_many_calls_at_once_get_answers_of_their_own() -> None:
    policy = Policy(echo)
    async with rollout(policy) as client:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=100, limits=limits) as http:
            url = f"{client.endpoint.base_url}/chat/completions"
            asked = [{"messages": [{"role": "user", "content": f"q{number}"}]} for number in range(200)]
            responses = await asyncio.gather(*(http.post(url, json=body) for body in asked))
        texts = [response.json()["choices"][0]["message"]["content"] for response in responses]
        assert len(set(texts)) == 200
        await eventually(lambda: len(client.endpoint.trajectories()[0].steps) == 200)
        steps = client.endpoint.trajectories()[0].steps
        said = {step.messages[0]["content"]: step.text for step in steps}
        assert [said[f"q{number}"] for number in range(200)] == texts
        check_exact(policy, client.endpoint)


async def test_a_body_that_is_too_large_is_refused_without_reading_it() -> None:
    async with rollout(Policy(echo)) as client:
        port = int(client.gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = f"/r/{client.endpoint.api_key}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        writer.write(head.encode())
        assert b" 413 " in await reader.readline()
        writer.close()
        await client.ask([USER])


async def test_a_body_that_is_not_compressed_as_it_says_is_refused() -> None:
    async with rollout(Policy(echo)) as client, httpx.AsyncClient() as http:
        for content in (b"no gzip", gzip.compress(json.dumps({"messages": [USER]}).encode())[:20]):
            url = f"{client.endpoint.base_url}/chat/completions"
            response = await http.post(url, content=content, headers={"content-encoding": "gzip"})
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        await client.ask([USER])


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff\x13garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST\r\n\r\n", b"\r\n" * 50]
)
async def test_garbage_is_no_request(garbage: bytes) -> None:
    async with rollout(Policy(echo)) as client:
        port = int(client.gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
        await client.ask([USER])


async def test_the_server_leaves_the_signals_of_the_run_alone() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    async with rollout(Policy(echo)):
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


async def test_the_sdk_sees_errors_as_of_its_own_server() -> None:
    async with rollout(Policy(echo)) as client, sdk(client) as agent:
        with pytest.raises(openai.BadRequestError, match="cannot be honored"):
            await agent.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
            )
        assert [model.id async for model in agent.models.list()] == ["policy"]
        assert (await agent.models.retrieve("some/name")).id == "some/name"
        wrong = openai.AsyncOpenAI(base_url=f"{client.gateway.url}/r/wrong/v1", api_key="x")
        with pytest.raises(openai.AuthenticationError, match="no running rollout"):
            await wrong.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        await wrong.close()
        assert json.dumps(client.endpoint.metrics())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_stream_that_takes_long_begins_before_its_end(
    path: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gateway", "server"):
        monkeypatch.setattr(f"rllm_gateway.{module}.KEEP_ALIVE_SECONDS", 0.01)
    policy = Policy(echo)
    policy.hold = asyncio.Event()
    async with rollout(policy) as client, aiohttp.ClientSession() as session:
        body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 100, "messages": [USER], "input": "hi"}
        async with session.post(f"{client.endpoint.base_url}/{path}", json=body) as response:
            assert response.status == 200
            for _ in range(3):
                assert await response.content.readuntil(b"\n\n") == b": waiting for the model\n\n"
            if fails:
                client.endpoint.failure = None
                policy.fails = EngineError("lost a GPU")
            policy.hold.set()
            rest = (await response.content.read()).decode()
        assert ("lost a GPU" in rest) == fails
        assert ("answer" in rest) == (not fails)
        if fails:
            assert isinstance(client.endpoint.failure, EngineError)
            client.endpoint.failure = None  # else leaving raises it
        else:
            assert len(client.endpoint.trajectories()[0].steps) == 1


async def test_a_client_that_hangs_up_in_a_long_stream_cancels_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gateway", "server"):
        monkeypatch.setattr(f"rllm_gateway.{module}.KEEP_ALIVE_SECONDS", 0.01)
    policy = Policy(echo)
    policy.hold = asyncio.Event()
    async with rollout(policy) as client:
        async with aiohttp.ClientSession() as session:
            body = {"model": "m", "stream": True, "messages": [USER]}
            async with session.post(f"{client.endpoint.base_url}/chat/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
        await eventually(lambda: policy.cancelled == 1)
        assert client.endpoint.trajectories() == []


async def test_an_agent_without_a_network_finds_the_model_by_a_socket() -> None:
    policy = Policy(echo)
    async with rollout(policy, unix_socket=True) as client:
        path = Path(client.endpoint.socket)
        assert client.endpoint.env["RLLM_GATEWAY_SOCKET"] == str(path)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            url = f"{client.endpoint.base_url}/chat/completions"
            async with session.post(url, json={"messages": [USER]}) as response:
                assert (await response.json())["choices"][0]["message"]["content"].startswith("answer")
    assert not path.parent.exists()


async def test_log_probabilities_are_those_of_the_engine() -> None:
    async with rollout(Policy(lambda prompt, seed: "é!")) as client, sdk(client) as agent:
        for streamed in (False, True):
            asked: dict[str, Any] = {"model": "m", "messages": [USER], "logprobs": True}
            if streamed:
                async with agent.chat.completions.stream(**asked) as stream:
                    completion: Any = await stream.get_final_completion()
            else:
                completion = await agent.chat.completions.create(**asked)
            content = completion.choices[0].logprobs.content
            [*_, step] = client.endpoint.trajectories()[0].steps
            assert [one.logprob for one in content] == step.logprobs.tolist()
            assert bytes(byte for one in content[:-1] for byte in one.bytes).decode() == "é!"
            response = await agent.responses.create(
                model="m", input="hi", stream=False, include=["message.output_text.logprobs"]
            )
            [text] = response.output[0].content  # type: ignore[union-attr]
            assert [one.logprob for one in text.logprobs] == step.logprobs.tolist()  # type: ignore[union-attr]

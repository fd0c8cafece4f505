"""Tests clients that send too much, and those that read their answers slowly or never."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from conftest import Client, Policy, rollout
from rllm_gateway import Endpoint, Gateway

from rllm_core.engine import Terminated, TITOCompleter
from rllm_core.types import SamplingParams

USER = {"role": "user", "content": "hi"}
LONG = 3_000_000  # more than the kernel buffers


def echo(prompt: str, seed: int) -> str:
    """An answer that shows its seed."""
    return f"answer {seed}"


async def statuses(client: Client, bodies: list[bytes]) -> list[int]:
    """Posts all bodies at once, over connections of their own."""
    url = f"{client.endpoint.base_url}/chat/completions"

    async def post(body: bytes) -> int:
        async with session.post(url, data=body) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*map(post, bodies)))


async def test_a_flood_of_calls_gets_as_many_answers_as_allowed() -> None:
    policy = Policy(echo)
    gateway = Gateway(max_calls=5)
    await gateway.open()

    async def play() -> None:
        async with rollout(policy, gateway=gateway) as client, rollout(Policy(echo), gateway=gateway) as other:
            bodies = [json.dumps({"messages": [USER | {"content": str(at)}]}).encode() for at in range(200)]
            flood = asyncio.ensure_future(statuses(client, bodies))
            assert await statuses(other, bodies[:5]) == [200] * 5
            assert sorted(await flood) == [200] * 5 + [403] * 195
            assert len(policy.asked) == 5
            assert client.endpoint.metrics()["gateway_refused_4xx"] == 195
            assert "gateway_refused_4xx" not in other.endpoint.metrics()

    with pytest.raises(Terminated, match="has made 5 calls"):
        await play()
    await gateway.close()


async def test_a_flood_of_bodies_is_refused_and_not_kept() -> None:
    policy = Policy(echo)

    async def play() -> None:
        async with rollout(policy, max_request_bytes=500_000) as client:
            big = [json.dumps({"messages": [USER], "user": f"{at}".rjust(100_000)}).encode() for at in range(40)]
            assert sorted(await statuses(client, big)) == [200] * 4 + [403] * 36
            assert len(policy.asked) == 4
            assert sum(len(known.start) for known in client.endpoint.bodies._known) <= 500_000

    with pytest.raises(Terminated, match="sent more than 500,000 bytes"):
        await play()


async def test_a_body_without_a_length_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gateway", "server"):
        monkeypatch.setattr(f"rllm_gateway.{module}.MAX_BODY_BYTES", 100_000)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 10_000
            yield b" " * 10_000
            await asyncio.sleep(0)

    async with rollout(Policy(echo)) as client, aiohttp.ClientSession() as session:
        try:
            async with session.post(f"{client.endpoint.base_url}/chat/completions", data=endless()) as response:
                assert response.status == 413
                assert response.headers["x-should-retry"] == "false"
        except aiohttp.ClientConnectionError:  # the connection may be closed before the client reads why
            pass
        assert sent < 100_000_000
        assert client.endpoint.metrics()["gateway_refused_4xx"] == 1
        await client.ask([USER])


async def test_a_body_that_never_ends_does_not_keep_the_rollout() -> None:
    gateway = Gateway()
    await gateway.open()
    async with rollout(Policy(echo), gateway=gateway) as client:
        _, writer = await connected(gateway)
        writer.write(head(client.endpoint, 1000) + b'{"messages": [')
        await writer.drain()
        await client.ask([USER])
    await gateway.close()
    writer.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_never_reads_ends_with_its_rollout(streamed: bool) -> None:
    policy = Policy(lambda prompt, seed: "x" * LONG)
    gateway = Gateway()
    await gateway.open()
    async with long_rollout(policy, gateway) as endpoint:
        reader, writer = await connected(gateway)
        writer.write(request(endpoint, streamed=streamed))
        while not endpoint.sending:
            await asyncio.sleep(0.005)
        async with rollout(Policy(echo), gateway=gateway) as other:
            assert await statuses(other, [json.dumps({"messages": [USER]}).encode()]) == [200]
        [connection] = endpoint.sending
        assert connection.get_write_buffer_size() > 0
    assert endpoint.trajectories() == [], "what nobody got is not trained"
    while endpoint.sending:  # its client still reads nothing
        await asyncio.sleep(0.005)
    assert connection.get_write_buffer_size() == 0
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(LONG)
    await gateway.close()
    writer.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_reads_slowly_gets_its_answer(streamed: bool) -> None:
    policy = Policy(lambda prompt, seed: "x" * LONG)
    gateway = Gateway()
    await gateway.open()
    async with long_rollout(policy, gateway) as endpoint:
        reader, writer = await connected(gateway)
        writer.write(request(endpoint, streamed=streamed))
        got = 0
        while piece := await reader.read(1 << 16):
            got += piece.count(b"x")
            await asyncio.sleep(0.001)
        assert got >= LONG
        while endpoint.sending:
            await asyncio.sleep(0.005)
        [trajectory] = endpoint.trajectories()
        assert len(trajectory.steps) == 1
        writer.close()
    await gateway.close()


def long_rollout(policy: Policy, gateway: Gateway):  # type: ignore[no-untyped-def]
    """Opens the endpoint of a rollout whose answers may be long."""
    return gateway.rollout(TITOCompleter(policy, sampling_params=SamplingParams(max_response_tokens=2 * LONG)))


async def connected(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection whose client takes little at a time."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", int(gateway.url.rpartition(":")[2])))
    return await asyncio.open_connection(sock=one, limit=1 << 12)


def head(endpoint: Endpoint, length: int) -> bytes:
    """Begins a request."""
    path = f"/r/{endpoint.api_key}/v1/chat/completions"
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n".encode()
    )


def request(endpoint: Endpoint, *, streamed: bool) -> bytes:
    """A whole request."""
    body = json.dumps({"messages": [USER], "stream": streamed}).encode()
    return head(endpoint, len(body)) + body

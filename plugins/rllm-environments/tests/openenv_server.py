"""A small real server that speaks OpenEnv's protocol: count down to zero, one session at a time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from websockets.asyncio.server import ServerConnection, serve


@dataclass
class Behavior:
    """How the server deviates, and what it has seen."""

    capacity: int = 1
    refuses_politely: bool = True
    closes_after_steps: int | None = None
    gives_rewards: bool = True
    writes_done_as_text: bool = False
    open_sessions: int = 0
    seeds: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


@asynccontextmanager
async def server(behavior: Behavior, port: int = 0) -> AsyncIterator[str]:
    async def handle(socket: ServerConnection) -> None:
        if behavior.open_sessions >= behavior.capacity:
            if not behavior.refuses_politely:
                await socket.send(_error("full", "CAPACITY_REACHED"))
            await socket.close(1000)
            return
        behavior.open_sessions += 1
        try:
            await _session(socket, behavior)
        finally:
            behavior.open_sessions -= 1

    async with serve(handle, "127.0.0.1", port) as running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def _session(socket: ServerConnection, behavior: Behavior) -> None:
    left, steps = 0, 0
    async for raw in socket:
        message = json.loads(raw)
        data = message.get("data", {})
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            behavior.seeds.append(data.get("seed", -1))
            left = 3
            await socket.send(_shown(left, None, False))
        elif str(data.get("take", "")) not in ("1", "2", "3"):
            await socket.send(_error("take must be a number", "VALIDATION_ERROR"))
        elif steps == behavior.closes_after_steps:
            await socket.close(1000)
            return
        else:
            steps += 1
            left -= int(data["take"])
            reward = float(left == 0) if behavior.gives_rewards else None
            if reward is not None:
                behavior.rewards.append(reward)
            done = left <= 0
            await socket.send(_shown(left, reward, str(done) if behavior.writes_done_as_text else done))


def _shown(left: int, reward: float | None, done: bool | str) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"left": left}, "reward": reward, "done": done}})


def _error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})

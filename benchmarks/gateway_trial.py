"""One trial of `benchmarks.gateway`, in its own process.

    python -m benchmarks.gateway_trial '{"part": "call", ...}'

Prints its rows.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
from rllm_gateway import Endpoint, Gateway

from benchmarks import gateway_step, gateway_trace
from benchmarks.gateway_client import allow_many_connections, post, question
from benchmarks.gateway_policy import WORDS, Gate, Prompt
from benchmarks.gateway_referee import judge
from benchmarks.peer_environments import ROOT
from benchmarks.trials import Row
from rllm_core.engine import TITOCompleter
from rllm_core.runs.launch import rare_collections
from rllm_core.types import Messages

HOST = {"host": "127.0.0.1:1"}
TOGETHER = 8
TURNS_AROUND = 3


def user(rollout: int, turn: int, characters: int) -> dict[str, str]:
    """Returns a message of the user."""
    return {"role": "user", "content": f"{rollout} {turn} {WORDS}"[:characters]}


# --------------------------------------------------------------------------------------------------------------------
# Costs


Side = Callable[[int, int, Prompt], Awaitable[list[int]]]


async def native(first: int, turns: int, engine: Prompt) -> list[int]:
    """Runs rollouts concurrently with completers alone; returns the CPU nanoseconds of each of their turns."""
    rollouts, characters, spent = range(first, first + TOGETHER), len(engine.text), []
    conversations = [Messages([user(rollout, 0, characters)]) for rollout in rollouts]
    began = time.process_time_ns()
    completers = [TITOCompleter(engine, seed=rollout) for rollout in rollouts]
    for turn in range(turns):
        both = zip(completers, conversations, strict=True)
        steps = await asyncio.gather(*(completer.complete(messages) for completer, messages in both))
        spent.append(time.process_time_ns() - began)
        for rollout, messages, step in zip(rollouts, conversations, steps, strict=True):
            messages += [step.response, user(rollout, turn + 1, characters)]
        began = time.process_time_ns()
    return spent


async def through_handler(first: int, turns: int, engine: Prompt) -> list[int]:
    """Runs rollouts concurrently through the gateway without HTTP; the time of clients is not counted."""
    rollouts, characters, spent = range(first, first + TOGETHER), len(engine.text), []
    conversations: list[list[Any]] = [[user(rollout, 0, characters)] for rollout in rollouts]
    bodies = [msgspec.json.encode({"model": "m", "messages": messages}) for messages in conversations]
    gateway = Gateway()
    began = time.process_time_ns()
    async with AsyncExitStack() as stack:
        paths = []
        for rollout in rollouts:
            endpoint = await stack.enter_async_context(gateway.rollout(TITOCompleter(engine, seed=rollout)))
            paths.append(f"/r/{endpoint.api_key}/v1/chat/completions")
        for turn in range(turns):
            both = zip(paths, bodies, strict=True)
            responses = await asyncio.gather(*(gateway.handle("POST", path, HOST, body) for path, body in both))
            for response in responses:
                response.delivered()
            spent.append(time.process_time_ns() - began)
            for rollout, messages, response in zip(rollouts, conversations, responses, strict=True):
                messages.append(msgspec.json.decode(response.body)["choices"][0]["message"])
                messages.append(user(rollout, turn + 1, characters))
            bodies = [msgspec.json.encode({"model": "m", "messages": messages}) for messages in conversations]
            began = time.process_time_ns()
    spent[-1] += time.process_time_ns() - began
    return spent


async def over_http(rollouts: int, turns: int, engine: Prompt) -> float:
    """Runs rollouts over HTTP with a bare client in this process; returns CPU seconds, including the client's."""
    gateway = Gateway()
    await gateway.open()
    characters, waiting = len(engine.text), iter(range(rollouts))

    async def connection() -> None:
        port = int(gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for rollout in waiting:
            async with gateway.rollout(TITOCompleter(engine, seed=rollout)) as endpoint:
                messages: list[Any] = [user(rollout, 0, characters)]
                for turn in range(turns):
                    answer = await post(reader, writer, endpoint.base_url, messages)
                    messages += [answer, user(rollout, turn + 1, characters)]
        writer.close()
        await writer.wait_closed()

    try:
        began = time.process_time()
        await asyncio.gather(*(connection() for _ in range(TOGETHER)))
        return time.process_time() - began
    finally:
        await gateway.close()


def call(request: Row) -> Iterator[Row]:
    """Measures the cost of a call: natively, through the handler, over HTTP."""
    engine = Prompt(request["characters"])
    rollouts, turns = request["rollouts"], request["turns"]

    async def all_of(side: Side) -> float:
        return sum([sum(await side(first, turns, engine)) for first in range(0, rollouts, TOGETHER)]) / 1e9

    sides: dict[str, Callable[[], Any]] = {
        "native": lambda: all_of(native),
        "handler": lambda: all_of(through_handler),
        "http": lambda: over_http(rollouts, turns, engine),
    }
    for trial in range(-1, request["trials"]):  # the first one warms up
        for name in list(sides)[:: 1 if trial % 2 else -1]:
            gc.collect()
            seconds = asyncio.run(sides[name]())
            if trial >= 0:
                yield {"kind": "call", "side": name, "trial": trial, "calls": rollouts * turns, "cpu_seconds": seconds}


def length(request: Row) -> Iterator[Row]:
    """Measures the cost of early and late turns of a long conversation."""
    engine = Prompt(request["characters"])
    turns = max(request["at"]) + TURNS_AROUND + 1
    for trial in range(-1, request["trials"]):
        for name, side in (("native", native), ("handler", through_handler))[:: 1 if trial % 2 else -1]:
            gc.collect()
            spent = asyncio.run(side(trial, turns, engine))
            for turn in request["at"] if trial >= 0 else ():
                around = spent[turn - TURNS_AROUND - 1 : turn + TURNS_AROUND]
                us = statistics.fmean(around) / 1e3 / TOGETHER
                yield {"kind": "length", "side": name, "trial": trial, "turn": turn, "cpu_us": us}


# --------------------------------------------------------------------------------------------------------------------
# Tokens


def tokens(request: Row) -> Iterator[Row]:
    """Runs the trace through the gateway and through matching by position, and counts with the referee."""
    for way in ("gateway", "position"):
        engine, receipts, trained = asyncio.run(gateway_trace.play(way, request["rollouts"], request["seed"]))
        yield {"kind": "tokens", "way": way, **request, **judge(engine.given, receipts, trained)}


def memory(request: Row) -> Iterator[Row]:
    """Holds rollouts open, and compares the arrays in memory with the distinct tokens."""

    async def held() -> Row:
        engine = Prompt(request["characters"])
        gateway = Gateway()
        async with AsyncExitStack() as stack:
            endpoints = []
            for rollout in range(request["rollouts"]):
                completer = TITOCompleter(engine, seed=rollout)
                endpoints.append(await stack.enter_async_context(gateway.rollout(completer)))
                await _talk(gateway, endpoints[-1], rollout, request)
            skip = [engine, gateway]
            return {"array_bytes": array_bytes(endpoints, skip), "distinct_bytes": sum(map(distinct_bytes, endpoints))}

    yield {"kind": "memory", **request, **asyncio.run(held())}


async def _talk(gateway: Gateway, endpoint: Endpoint, rollout: int, request: Row) -> None:
    """A conversation with a branch every few turns, alternatives, and sub-agents."""
    path, characters = f"/r/{endpoint.api_key}/v1/chat/completions", request["characters"]

    async def ask(messages: Sequence[Any], count: int = 1) -> Any:
        body = msgspec.json.encode({"model": "m", "messages": messages, "n": count})
        response = await gateway.handle("POST", path, HOST, body)
        response.delivered()
        return msgspec.json.decode(response.body)["choices"][0]["message"]

    messages: list[Any] = [user(rollout, 0, characters)]
    for turn in range(request["turns"]):
        messages += [
            await ask(messages, count=2 if turn % 8 == 5 and request["branches"] else 1),
            user(rollout, turn + 1, characters),
        ]
        if not request["branches"]:
            continue
        if turn % 8 == 3:  # a call next to the conversation
            await ask([*messages[:-1], user(rollout, -turn, characters)])
        if turn % 8 == 7:
            sub = [user(-rollout, turn, characters)]
            for step in range(2):
                sub += [await ask(sub), user(-rollout, -step, characters)]


def array_bytes(roots: Sequence[object], skip: Sequence[object]) -> int:
    """Returns the bytes of all numpy buffers reachable from objects; views of a buffer count once."""
    seen = {id(one) for one in skip}
    buffers: dict[int, int] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | type(gc) | type(array_bytes)):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            base: Any = one
            while isinstance(base.base, np.ndarray):
                base = base.base
            buffers[id(base)] = base.nbytes if base.base is None else memoryview(base.base).nbytes
        else:
            waiting += gc.get_referents(one)
    return sum(buffers.values())


def distinct_bytes(endpoint: Endpoint) -> int:
    """Returns the bytes of the distinct tokens of a rollout's answers: 4 for each, and 4 more for a sampled one."""
    prompts: set[tuple[str, bytes]] = set()
    count = 0
    for answer in endpoint.forest.paths():
        step, before = answer.step, answer.before
        is_continued = before is not None and step.continues(before.step)
        known = 0
        if before is not None and is_continued:
            known = len(before.step.prompt_ids) + len(before.step.completion_ids)
        new = (before.id if before is not None and is_continued else "", step.prompt_ids[known:].tobytes())
        count += 0 if new in prompts else len(step.prompt_ids) - known
        prompts.add(new)
        count += 2 * len(step.completion_ids)
    return 4 * count


# --------------------------------------------------------------------------------------------------------------------
# Many calls at once


def crowd(request: Row) -> Iterator[Row]:
    """Answers many simultaneous calls of another process, once all of them have arrived."""
    allow_many_connections()

    async def answered() -> Row:
        engine, calls = Gate(request["calls"], request["seconds"]), request["calls"]
        gateway = Gateway()
        await gateway.open()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(gateway.close)
            endpoints = [
                await stack.enter_async_context(gateway.rollout(TITOCompleter(engine, seed=rollout)))
                for rollout in range(request["rollouts"])
            ]
            began, cpu = time.perf_counter(), time.process_time()
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.gateway_client"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            asked = json.dumps({"calls": calls, "urls": [endpoint.base_url for endpoint in endpoints]})
            printed, _ = await client.communicate(asked.encode())
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            steps = [
                [(step.messages[-1]["content"], step.text) for one in endpoint.trajectories() for step in one.steps]
                for endpoint in endpoints
            ]
        wanted = [[question(n) for n in range(rollout, calls, len(endpoints))] for rollout in range(len(endpoints))]
        right = sum(len(set(said) & {(one, one) for one in mine}) for said, mine in zip(steps, wanted, strict=True))
        return {
            **json.loads(printed),
            "simultaneous": engine.most,
            "right_steps": right,
            "steps": sum(map(len, steps)),
            "wall_seconds": wall,
            "server_cpu_seconds": cpu,
        }

    yield {"kind": "crowd", **request, **asyncio.run(answered())}


# --------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the trial that the only argument describes."""
    request = json.loads(sys.argv[1])
    parts: dict[str, Callable[[Row], Iterator[Row]]] = {
        "tokens": tokens,
        "call": call,
        "length": length,
        "memory": memory,
        "crowd": crowd,
        "step": gateway_step.step,
    }
    with rare_collections():  # as in a run
        for row in parts[request.pop("part")](request):
            print(json.dumps({**row, "load_average": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()

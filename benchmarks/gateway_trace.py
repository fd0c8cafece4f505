"""Many agents at once, through the gateway or through matching by position, for the referee of `benchmarks.gateway`.

An agent has a conversation with tools. During it, the agent asks for titles, runs sub-agents (two at a time, with equal
prompts), asks for several answers at once, asks the same again, goes back to an earlier answer, compacts its history,
and hangs up or loses an answer and retries. It rewrites answers: with other ids, other
spacing, without reasoning. Groups of eight rollouts have the same task, so they send the same prompts.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rllm_gateway import Endpoint, Gateway
from rllm_gateway.gateway import Response

from benchmarks.gateway_policy import CallParser, OfRollout, ShufflingEngine
from benchmarks.gateway_referee import Receipt, Trained, labels
from rllm_core.algorithms.samples import training_samples
from rllm_core.engine import TITOCompleter
from rllm_core.types import TrajectoryGroup

ROLLOUTS_PER_TASK = 8
RETRIED = 0.1
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
Post = Callable[[bytes, Mapping[str, str]], Awaitable[Response]]


async def play(way: str, rollouts: int, seed: int) -> tuple[ShufflingEngine, list[Receipt], dict[int, list[Trained]]]:
    """Runs all rollouts at once.

    Args:
        way: ``gateway`` or ``position``.
        rollouts: Number of rollouts.
        seed: Seed of the agents and the engine.

    Returns:
        The engine, the answers to clients, and the training samples by rollout.
    """
    engine = ShufflingEngine(seed)
    receipts: list[Receipt] = []
    answering = asyncio.create_task(engine.answer_in_random_order())
    gateway = Gateway()

    async def play_one(rollout: int) -> list[Trained]:
        source, chance = engine.of_rollout(rollout), random.Random(f"{seed} {rollout}")
        if way == "position":
            matcher = PositionMatcher(source)
            await Agent(rollout, chance, matcher.post, receipts).play()
            return matcher.trained()
        completer = TITOCompleter(engine, source=source, seed=rollout)
        async with gateway.rollout(completer) as endpoint:
            path = f"/r/{endpoint.api_key}/v1/chat/completions"

            def post(body: bytes, headers: Mapping[str, str]) -> Awaitable[Response]:
                return gateway.handle("POST", path, {"host": "127.0.0.1:1", **headers}, body)

            await Agent(rollout, chance, post, receipts).play()
        return trained(endpoint, rollout)

    try:
        played = await asyncio.gather(*(play_one(rollout) for rollout in range(rollouts)))
    finally:
        answering.cancel()
    return engine, receipts, dict(enumerate(played))


def trained(endpoint: Endpoint, rollout: int) -> list[Trained]:
    """Returns the training samples of a rollout."""
    trajectories = [one for one in endpoint.trajectories() if one.steps]
    group = TrajectoryGroup(
        group_id=0,
        task_id="task",
        trajectories=trajectories,
        rollout_ids=[str(rollout)] * len(trajectories),
        weight_version=0,
    )
    samples = training_samples(group, [np.ones(len(one.steps)) for one in trajectories])
    found = []
    for sample in samples:
        assert sample.logprobs is not None
        found.append(Trained(sample.token_ids, sample.turn_spans, sample.logprobs))
    return found


class Agent:
    """An agent and its client.

    Args:
        rollout: Number of the rollout.
        chance: Random generator of its choices.
        post: Posts a body, with headers.
        receipts: List to which answers are added.
    """

    def __init__(self, rollout: int, chance: random.Random, post: Post, receipts: list[Receipt]) -> None:
        self._rollout, self._chance, self._post, self._receipts = rollout, chance, post, receipts

    async def play(self) -> None:
        """Runs the conversation, with its side calls."""
        task = self._rollout // ROLLOUTS_PER_TASK
        begun = [
            {"role": "system", "content": "[main] be brief"},
            {"role": "user", "content": f"[task{task}] what is it?"},
        ]
        beside = []
        if self._happens(0.3):
            beside.append(asyncio.create_task(self._ask([{"role": "user", "content": f"[title] of [task{task}]"}])))
        history = list(begun)
        turns = self._chance.randrange(4, 9)
        compacts, goes_back = (self._chance.randrange(2, 8) for _ in range(2))
        for turn in range(turns):
            if self._happens(0.1):  # best of n, with calls of its own
                answers = list(await asyncio.gather(self._ask(history), self._ask(history)))
            else:
                answers = [await self._ask(history, count=2 if self._happens(0.1) else 1)]
            history.append(self._shown(self._chance.choice([one for some in answers for one in some])))
            history += await self._results(history[-1], turn)
            if turn == goes_back and len(history) > len(begun) + 3:
                last = max(at for at, one in enumerate(history[:-2]) if one["role"] == "assistant")
                history[last + 1 :] = [*await self._results(history[last], turn), _user(f"[instead{turn}]")]
            if turn == compacts:
                [summary] = await self._ask([*history, _user("[summarize]")])
                history = [begun[0], _user(f"[task{task}] so far: {summary['content']}")]
        await asyncio.gather(*beside)

    async def _results(self, answer: Mapping[str, Any], turn: int) -> list[dict[str, Any]]:
        """Returns the results of its calls, some of them by sub-agents, or a message of the user."""
        calls = answer.get("tool_calls") or ()
        if not calls:
            return [_user(f"[turn{turn}] go on")]
        if self._happens(0.3):
            found = await asyncio.gather(*(self._delegated(turn) for _ in calls))
        else:
            found = [f"[result{turn}.{at}]" for at in range(len(calls))]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, found, strict=True)
        ]

    async def _delegated(self, turn: int) -> str:
        """Runs a sub-agent. Sub-agents of one turn start with equal prompts."""
        history: list[Any] = [{"role": "system", "content": "[sub] help"}, _user(f"[part{turn}] do it")]
        for step in range(self._chance.randrange(1, 4)):
            [answer] = await self._ask(history)
            history.append(self._shown(answer))
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"[sub{step}]"}
                for call in history[-1].get("tool_calls") or ()
            ]
            history += results or [_user(f"[subturn{step}]")]
        return f"[done] {answer['content']}"

    async def _ask(self, messages: Sequence[Mapping[str, Any]], count: int = 1) -> list[dict[str, Any]]:
        """Returns the answers, after a retry if the first attempt ends without."""
        content = {"model": "m", "messages": copy.deepcopy(list(messages)), "tools": TOOLS, "n": count}
        body, headers = msgspec.json.encode(content), {}
        if self._happens(RETRIED):
            attempt = asyncio.ensure_future(self._post(body, headers))
            if self._happens(0.5):  # it hangs up, in most cases while it waits
                for _ in range(self._chance.randrange(2000)):
                    await asyncio.sleep(0)
                attempt.cancel()
            with suppress(asyncio.CancelledError):
                await attempt  # the answer is lost on its way
            headers = {"x-stainless-retry-count": "1"}
        response = await self._post(body, headers)
        if response.status != 200:
            raise RuntimeError(f"a call was refused: {response.body.decode()}")
        response.delivered()
        choices = msgspec.json.decode(response.body)["choices"]
        asked = [label for one in messages for label in labels(json.dumps(one.get("content")))]
        for choice in choices:
            self._receipts.append(Receipt(self._rollout, tuple(asked), choice["message"]["content"]))
        return [choice["message"] for choice in choices]

    def _shown(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer as the agent rewrites it."""
        message: dict[str, Any] = copy.deepcopy(dict(answer))
        if self._happens(0.5):
            message.pop("reasoning_content", None)
        for at, call in enumerate(message.get("tool_calls") or ()):
            if self._happens(0.3):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=3)
            if self._happens(0.2):
                call["id"] = f"mine{at}"
        if self._happens(0.2):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def _happens(self, share: float) -> bool:
        return self._chance.random() < share


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class PositionMatcher:
    """Baseline for the gateway: matches calls to turns by their number, whatever their content.

    A call with k answers in its history continues the newest sequence with k turns or more. If that has one more,
    the call is taken for a retry, whose answer replaces that turn. If it has even more, the call begins a sequence of
    its own with a copy of the first k turns. All sampled tokens of every sequence are trained.

    Args:
        source: Samples.
    """

    def __init__(self, source: OfRollout) -> None:
        self._source = source
        self._parser = CallParser()
        self._sequences: list[list[Any]] = []

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Response:
        """Answers a call, as `Gateway.handle`."""
        request = msgspec.json.decode(body)
        messages = request["messages"]
        choices = await asyncio.gather(*(self._answer(messages) for _ in range(request["n"])))
        return Response(200, msgspec.json.encode({"choices": [{"message": message} for message in choices]}))

    async def _answer(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        known = sum(one["role"] == "assistant" for one in messages)
        found = next((one for one in reversed(self._sequences) if len(one) >= known), None) if known else []
        if not found:
            prompt = np.array(self._parser.render(messages), np.int32)
        else:
            last = max(at for at, one in enumerate(messages) if one["role"] == "assistant")
            before = found[known - 1]
            prompt = self._parser.bridge_to_next_turn(before.prompt, before.completion, messages[last + 1 :])
        output = await self._source.get_token_output_from_token_input(prompt, sampling_params=None, seed=0)
        turn = _Turn(prompt, output.token_ids, output.logprobs)
        if found and len(found) <= known + 1:
            found[known:] = [turn]
        else:
            self._sequences.append([*(found or [])[:known], turn])
        return self._parser.parse_completion(output.token_ids).to_message(turn=known)

    def trained(self) -> list[Trained]:
        """Returns a sample per sequence."""
        return [
            Trained(
                np.concatenate([turns[-1].prompt, turns[-1].completion]),
                tuple((len(turn.prompt), len(turn.prompt) + len(turn.completion)) for turn in turns),
                np.concatenate([turn.logprobs for turn in turns]),
            )
            for turns in self._sequences
        ]


class _Turn(NamedTuple):
    prompt: Any
    completion: Any
    logprobs: Any

"""Tests lockstep: requests wait for every running rollout and are sent in the order of their seeds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import virtual_clock
from rllm_core.config import RolloutConfig
from rllm_core.engine import TokenSource
from rllm_core.training import requests
from rllm_core.training.requests import RequestMerger
from rllm_core.types import SamplingParams, TokenOutput
from rllm_devkit.scripted import ScriptedEngine


def ask(source: TokenSource, prompt: list[int], seed: int) -> asyncio.Task[Any]:
    params = SamplingParams(stop_token_ids=(257,))
    return asyncio.create_task(source.get_token_output_from_token_input(prompt, sampling_params=params, seed=seed))


def test_lockstep_waits_for_every_running_rollout() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=10), lockstep=True)
        merger.rollout_started()
        merger.rollout_started()
        first = ask(merger, [1], 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.calls == 0, "the other rollout has not asked yet"
        second = ask(merger, [1], 1)
        await asyncio.gather(first, second)
        assert engine.calls == 1
        merger.rollout_ended()
        await ask(merger, [2], 0)
        third = ask(merger, [2], 1)
        merger.rollout_started()
        await third  # a rollout that waits for something else delays the others by the grace time only

    asyncio.run(run())


def test_lockstep_waits_for_a_rollout_that_had_no_turn_while_the_time_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as on a busy machine: the rollout waits for nothing but the event loop."""
    monkeypatch.setattr(requests, "LOCKSTEP_GRACE_SECONDS", 0.0)

    async def run() -> int:
        engine = ScriptedEngine()
        merger = RequestMerger(engine, RolloutConfig(), lockstep=True)
        merger.rollout_started()
        merger.rollout_started()
        first = ask(merger, [1], 0)
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.gather(first, ask(merger, [1], 1))
        return engine.calls

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(("outside", "waited"), [(0, 0.02), (1, 2.0)])
def test_lockstep_waits_longer_for_a_rollout_that_calls_a_tool(outside: int, waited: float) -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        merger = RequestMerger(ScriptedEngine(), RolloutConfig(), lockstep=True, outside=lambda: outside)
        merger.rollout_started()
        merger.rollout_started()
        began = loop.time()
        await ask(merger, [1], 0)
        return loop.time() - began

    assert virtual_clock.run(run()) == pytest.approx(waited, abs=0.03)


def test_lockstep_goes_on_at_once_when_every_rollout_waits_for_an_answer() -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        merger = RequestMerger(ScriptedEngine(), RolloutConfig(), lockstep=True)
        one, other = merger.source(), merger.source()
        merger.rollout_started()
        merger.rollout_started()
        times = [loop.time()]
        for asked in ((one, other), (one, other), (one, one)):
            await asyncio.gather(*(ask(source, [1], seed) for seed, source in enumerate(asked)))
            times.append(loop.time())
        return [after - before for before, after in itertools.pairwise(times)]

    assert virtual_clock.run(run()) == [0.0, 0.0, pytest.approx(0.02, abs=0.001)], (
        "two requests of one rollout wait for the other"
    )


def test_lockstep_asks_in_the_order_of_the_seeds_and_gives_each_its_answer() -> None:
    asked: list[list[int]] = []

    class Noting(ScriptedEngine):
        async def get_token_outputs_from_token_input(
            self, token_input: Any, *, seeds: Sequence[int], **options: Any
        ) -> list[TokenOutput]:
            asked.append(list(seeds))
            return await super().get_token_outputs_from_token_input(token_input, seeds=seeds, **options)

    async def run() -> None:
        merger = RequestMerger(Noting(), RolloutConfig(max_concurrent_requests=10), lockstep=True)
        requests = [([2], 7), ([1], 9), ([2], 3), ([1], 4), ([1], 8)]
        answers = await asyncio.gather(*(ask(merger, prompt, seed) for prompt, seed in requests))
        alone = [await ask(merger, prompt, seed) for prompt, seed in requests]
        assert [answer.to_json() for answer in answers] == [answer.to_json() for answer in alone]

    asyncio.run(run())
    assert asked[:2] == [[3, 7], [4, 8, 9]]

"""Tests that what arrives in one moment is worked off in slices."""

from __future__ import annotations

import asyncio
from typing import Any

from rllm_core.config import RolloutConfig
from rllm_core.limits.slices import Slices
from rllm_core.training.requests import ANSWERS_PER_ROUND, RequestMerger
from rllm_core.types import SamplingParams, token_ids
from rllm_devkit.scripted import ScriptedEngine


async def join(slices: Slices) -> None:
    if (next_round := slices.wait()) is not None:
        await next_round


async def rounds_of(tasks: list[asyncio.Task[None]], passed: list[int]) -> list[int]:
    """Returns how many had passed after each round of the event loop in which some did."""
    counts: list[int] = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if len(passed) > (counts[-1] if counts else 0):
            counts.append(len(passed))
    return counts


def test_tasks_pass_in_order_and_a_few_per_round() -> None:
    slices, passed = Slices(3), list[int]()

    async def one(number: int) -> None:
        await join(slices)
        passed.append(number)

    async def run() -> None:
        tasks = [asyncio.create_task(one(number)) for number in range(10)]
        assert await rounds_of(tasks, passed) == [3, 6, 9, 10]
        assert passed == list(range(10))

    for _ in range(2):  # also in another loop
        asyncio.run(run())
        passed.clear()


def test_a_task_that_gives_up_takes_no_room() -> None:
    async def run() -> None:
        slices, passed = Slices(2), list[int]()

        async def one(number: int) -> None:
            await join(slices)
            passed.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(7)]
        await asyncio.sleep(0)
        for number in (2, 3, 6):
            tasks[number].cancel()
        counts = await rounds_of(tasks, passed)
        assert passed == [0, 1, 4, 5]
        assert counts[-1] == 4

    asyncio.run(run())


def test_tasks_that_come_one_by_one_do_not_wait() -> None:
    async def run() -> None:
        slices = Slices(1)
        for _ in range(5):
            joining = asyncio.create_task(join(slices))
            await asyncio.sleep(0)
            assert joining.done()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_loop_that_ended_leaves_nothing_behind() -> None:
    slices = Slices(1)

    async def interrupted() -> None:
        waiting = [asyncio.create_task(join(slices)) for _ in range(3)]
        await asyncio.sleep(0)
        assert [one.done() for one in waiting] == [True, False, False]

    async def later() -> None:
        await asyncio.wait_for(join(slices), 60)

    asyncio.run(interrupted())
    asyncio.run(later())


def test_answers_of_one_moment_reach_their_rollouts_in_slices() -> None:
    class Together(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.gate = asyncio.Event()

        async def get_token_outputs_from_token_input(self, *args: Any, **options: Any) -> Any:
            await self.gate.wait()
            return await super().get_token_outputs_from_token_input(*args, **options)

    async def run() -> None:
        engine, passed = Together(), list[int]()
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=1000), lockstep=False)

        async def ask(number: int) -> None:
            await merger.get_token_output_from_token_input(
                token_ids([number]), sampling_params=SamplingParams(stop_token_ids=(257,)), seed=number
            )
            passed.append(number)

        asked = 3 * ANSWERS_PER_ROUND
        tasks = [asyncio.create_task(ask(number)) for number in range(asked)]
        while merger.calls < asked:
            await asyncio.sleep(0)
        engine.gate.set()
        assert await rounds_of(tasks, passed) == [ANSWERS_PER_ROUND, 2 * ANSWERS_PER_ROUND, asked]
        assert passed == list(range(asked))

    asyncio.run(run())

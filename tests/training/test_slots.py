"""Tests slots with priority: none is lost, and validation never queues behind training."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rllm_core.limits.slots import Slots


def test_priority_goes_first_and_each_lane_keeps_its_order() -> None:
    async def run() -> list[str]:
        slots, served = Slots(1), []

        async def work(name: str, priority: bool) -> None:
            async with slots.place(priority=priority):
                served.append(name)
                await asyncio.sleep(0)

        await slots.take(priority=False)
        tasks = []
        for name, priority in [("a", False), ("A", True), ("b", False), ("B", True), ("c", False)]:
            tasks.append(asyncio.create_task(work(name, priority)))
            await asyncio.sleep(0)
        assert served == []
        slots.give_back()
        await asyncio.gather(*tasks)
        return served

    assert asyncio.run(run()) == ["A", "B", "a", "b", "c"]


def test_no_place_is_lost_whoever_is_cancelled_when() -> None:
    async def run(seed: int) -> None:
        chance, slots, running, most = random.Random(seed), Slots(3), 0, 0

        async def work() -> None:
            nonlocal running, most
            async with slots.place(priority=chance.random() < 0.3):
                running += 1
                most = max(most, running)
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks: list[asyncio.Task[None]] = []
        for _ in range(200):
            tasks.append(asyncio.create_task(work()))
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 3
        for _ in range(3):  # every slot is free again
            await asyncio.wait_for(slots.take(priority=False), 60)
        assert slots._free == 0

    for seed in range(30):
        asyncio.run(run(seed))


@pytest.mark.slow
def test_validation_is_not_held_up_by_training_that_waits(run_scripted: Any) -> None:
    order: list[bool] = []

    def watch(assembly: Any) -> None:
        original = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Any:
            order.append(completer.is_validation)
            return await original(task, completer)

        assembly.workflow.run = run

    ahead = ("training.staleness_threshold=4", "training.partial_rollout=true", "rollout.max_concurrent_rollouts=2")
    run = run_scripted(*ahead, "training.validate_every_steps=1", "say_yes.turns=2", prepare=watch)
    assert run.error is None
    position = [index for index, is_validation in enumerate(order) if is_validation]
    spans = [position[start : start + 10] for start in range(10, len(position), 10)]
    assert len(spans) == 6
    # Among the ten validation rollouts are at most the two training rollouts already running.
    assert all(span[-1] - span[0] < 10 + 2 for span in spans)

"""A workflow that misbehaves as its run file specifies, on every rollout or on some."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.hookspecs import hookimpl
from rllm_core.providers import WorkflowProvider
from rllm_core.types import Episode, Step, Task, Trajectory
from rllm_core.workflow import Workflow, WorkflowConfig

QUESTION = [{"role": "user", "content": "sort: dbca"}]


class RudeConfig(WorkflowConfig):
    """``[rude]``."""

    way: str = Field(description="How it misbehaves.")
    every: int = Field(default=1, ge=1, description="One rollout in so many does.")


class Fatal(BaseException):
    """Exception that no ``except Exception`` catches."""


class Rude(Workflow):
    """See `WAYS`."""

    name = "rude"
    config_model = RudeConfig
    config: RudeConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self.rollouts = itertools.count(1)
        self.kept: list[Any] = []

    def tasks(self, split: str) -> list[Task]:
        return [Task(task_id=f"{split}-{number}") for number in range(6)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        step = await completer.complete(QUESTION)
        if next(self.rollouts) % self.config.every or "RUDE_IS_CURED" in os.environ:
            return self.episode(task, [step], reward=len(step.text) / 10)
        Path(os.environ["RUDE_MARK"]).touch()
        return await WAYS[self.config.way](self, task, completer, step)  # type: ignore[no-any-return]


Way = Callable[[Rude, Task, Completer, Step], Awaitable[Any]]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def rewarded(name: str, reward: Callable[[], Any]) -> None:
    async def run(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
        return rude.episode(task, [step], reward=reward())

    WAYS[f"reward_{name}"] = run


rewarded("nan", lambda: float("nan"))
rewarded("infinite", lambda: float("inf"))
rewarded("huge", lambda: 1e35)
rewarded("text", lambda: "1.0")
rewarded("list", lambda: [1.0])
rewarded("missing", lambda: None)
rewarded("bool", lambda: True)
rewarded("decimal", lambda: Decimal("0.5"))
rewarded("array", lambda: np.array(0.5))
rewarded("vector", lambda: np.array([0.5, 0.5]))
rewarded("float32", lambda: np.float32(0.5))
rewarded("whole", lambda: 10**400)


@way
async def returns_nothing(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return None


@way
async def returns_steps(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return [step]


@way
async def returns_another_task(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return Episode(task_id="another", trajectories=[Trajectory(steps=[step], reward=1.0)])


@way
async def returns_another_step(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    rude.kept.append(step)
    return rude.episode(task, [rude.kept[0]], reward=1.0)


@way
async def returns_a_step_twice(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return rude.episode(task, [step, step], reward=1.0)


@way
async def changes_tokens(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    step.completion_ids = step.completion_ids[::-1].copy()
    return rude.episode(task, [step, await completer.fork().complete(QUESTION)], reward=1.0)


@way
async def changes_the_reward_later(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    episode = rude.episode(task, [step], reward=0.25)

    def rewrite() -> None:
        episode.trajectories[0].__dict__["reward"] = 777.0

    asyncio.get_running_loop().call_soon(rewrite)
    return episode


@way
async def returns_a_huge_metric(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return rude.episode(task, [step], reward=1.0, metrics={"distance": sys.float_info.max})


@way
async def returns_many_metrics(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    metrics = {f"metric {number} {'x' * 80}": 1.0 for number in range(100_000)}
    return rude.episode(task, [step], reward=1.0, metrics=metrics)


@way
async def returns_what_is_no_trajectory(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return Episode.model_construct(task_id=task.task_id, trajectories=["a trajectory"])


@way
async def raises(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    raise KeyError("a tool has no such key")


@way
async def raises_a_group(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    raise ExceptionGroup("two tools failed", [ValueError("the first"), OSError("the second")])


@way
async def raises_a_long_text(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    raise ValueError("line\n" * 100_000 + "\x1b[2J")


@way
async def exits(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--n", type=int)
    parser.parse_args(["--n", "abc"])


@way
async def exits_in_a_task(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    async def tool() -> None:
        sys.exit(3)

    await asyncio.create_task(tool())


@way
async def interrupts_itself(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    raise KeyboardInterrupt


@way
async def raises_what_nobody_catches(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    raise Fatal("not an Exception")


@way
async def recurses(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    def deeper(level: int) -> int:
        return deeper(level + 1)

    return deeper(0)


@way
async def cancels_itself(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


@way
async def cancels_everything(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    for running in asyncio.all_tasks():
        running.cancel()
    await asyncio.sleep(0)


@way
async def swallows_everything(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    async def flaky_tool() -> None:
        await asyncio.sleep(0.2)
        raise OSError("down")

    while True:
        try:
            await flaky_tool()
            break
        except:  # noqa: E722 - what people write around a flaky tool
            continue


@way
async def swallows_one_cancellation(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return rude.episode(task, [step], reward=1.0)


@way
async def asks_again_when_it_is_cancelled(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return rude.episode(task, [await completer.complete(QUESTION)], reward=1.0)


@way
async def forgets_the_loser(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    racing = [asyncio.ensure_future(completer.fork().complete(QUESTION)) for _ in range(2)]
    rude.kept += racing
    done, _ = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
    return rude.episode(task, [next(iter(done)).result()], reward=1.0)


@way
async def asks_after_the_end(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    async def late() -> None:
        while True:
            await asyncio.sleep(0)
            try:
                await completer.fork().complete(QUESTION)
            except RuntimeError as error:
                rude.kept.append(error)
                return

    rude.kept.append(asyncio.ensure_future(late()))
    return rude.episode(task, [step], reward=len(step.text) / 10)


@way
async def asks_from_a_thread(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    asked = await asyncio.to_thread(lambda: asyncio.run(completer.complete(QUESTION)))
    return rude.episode(task, [asked], reward=1.0)


@way
async def asks_from_a_thread_properly(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    loop = asyncio.get_running_loop()
    asked = await asyncio.to_thread(
        lambda: asyncio.run_coroutine_threadsafe(completer.fork().complete(QUESTION), loop).result()
    )
    return rude.episode(task, [step, asked], reward=len(step.text) / 10)


@way
async def forks_and_forgets_to_exit(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    os.fork()
    return rude.episode(task, [step], reward=len(step.text) / 10)


@way
async def leaves_a_thread(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    def forever() -> None:
        while True:
            time.sleep(0.1)

    threading.Thread(target=forever, name="poller").start()
    return rude.episode(task, [step], reward=len(step.text) / 10)


@way
async def leaves_work_in_the_pool(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    def tool() -> None:
        time.sleep(3600)

    rude.kept.append(asyncio.get_running_loop().run_in_executor(None, tool))
    return rude.episode(task, [step], reward=len(step.text) / 10)


@way
async def leaves_a_stubborn_task(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    rude.kept.append(asyncio.ensure_future(stubborn()))
    return rude.episode(task, [step], reward=len(step.text) / 10)


@way
async def sleeps_on_the_loop(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    time.sleep(3600)


@way
async def computes_for_ever(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    number = 0
    while True:
        number += 1


@way
async def sleeps_in_c(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    ctypes.PyDLL(None).sleep(3600)


@way
async def waits_in_c(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    """Like `computes_in_c`, without the CPU time: a signal does not end the wait for a mutex, either."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@way
async def computes_in_c(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    return sum(range(10**15))  # neither lets another thread run nor checks for signals


@way
async def matches_for_ever(rude: Rude, task: Task, completer: Completer, step: Step) -> Any:
    re.match(r"(a+)+b", "a" * 64)


@hookimpl
def workflows() -> list[WorkflowProvider]:
    return [WorkflowProvider(name="rude", load="rude:Rude", config="rude:RudeConfig", summary="Misbehaves.")]

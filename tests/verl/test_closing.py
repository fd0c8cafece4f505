"""The end of a Ray cluster that this process has started, for backend ``verl`` and for host ``ray``."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rllm_verl.cluster import Cluster
from verl_runs import run_config

FREES_OBJECTS_WHILE_IT_CLOSES = """
import asyncio, sys, threading, time
from pathlib import Path

import ray

{opens}
objects = [ray.put(number) for number in range(20_000)]
closing = threading.Thread(target=close)
closing.start()
while closing.is_alive() and objects:
    objects.pop()
    time.sleep(0.0002)
closing.join()
print("closed:", {closed})
"""
OF_VERL = """
from rllm_verl.cluster import Cluster
from verl_runs import run_config

config = run_config(Path(sys.argv[1]))
cluster = Cluster(config, config.plugins["verl"])
asyncio.run(cluster.open())
close = cluster.close
"""
OF_RAY = """
from rllm_ray.cluster import Cluster
from rllm_ray.config import RayConfig

cluster = Cluster(RayConfig())
asyncio.run(cluster.open(1))
close = lambda: asyncio.run(cluster.close())
"""

USES_RAY_AGAIN = """
import asyncio, sys, time
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from rllm_core.errors import RunError

{opens}

class Worker:
    def hang(self):
        time.sleep(3600)


def calls_twice():
    try:
        ray.get(workers[0].hang.remote())
    except RayActorError:
        for _ in range(100):
            if ray.is_initialized():
                time.sleep(0.01)
        ray.put("what verl does next")


async def one_dies():
    call = asyncio.create_task(cluster.call("the call", calls_twice))
    ray.kill(workers[1])
    try:
        await call
    except RunError as error:
        print(error)


workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
cluster.watch(dict(zip(["first", "second"], workers)))
asyncio.run(one_dies())
cluster.close()
cluster._thread.shutdown(wait=True)
print("closed:", not ray.is_initialized())
"""


def ended(script: str, opens: str, model: Path, **values: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script.format(opens=opens, **values), str(model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("opens", "closed"),
    [
        pytest.param(OF_VERL, "cluster.dead() == []", id="verl"),
        pytest.param(OF_RAY, "not ray.is_initialized()", id="ray"),
    ],
)
def test_objects_that_are_freed_meanwhile_do_not_end_the_process(model: Path, opens: str, closed: str) -> None:
    """As by answers of cancelled requests, which arrive after a server has died."""
    child = ended(FREES_OBJECTS_WHILE_IT_CLOSES, opens, model, closed=closed)
    assert child.stdout.endswith("closed: True\n"), child.stderr[-2000:]
    assert child.returncode == 0


def test_a_call_that_was_abandoned_ends_before_ray(model: Path) -> None:
    child = ended(USES_RAY_AGAIN, OF_VERL, model)
    assert "the call: second died" in child.stdout, child.stderr[-2000:]
    assert child.stdout.endswith("closed: True\n"), child.stderr[-2000:]
    assert child.returncode == 0


def test_the_error_of_a_call_that_a_signal_abandoned_is_not_printed(model: Path) -> None:
    """Closing kills the workers, so the call fails when nobody waits for it any more."""
    config = run_config(model)
    cluster = Cluster(config, config.plugins["verl"])
    printed: list[dict[str, Any]] = []

    async def abandoned() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: printed.append(context))
        call = loop.create_future()
        waiting = asyncio.create_task(cluster.watched("starting the trainers", call))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        call.set_exception(RuntimeError("the actor was killed"))
        await asyncio.sleep(0)
        del call
        gc.collect()

    asyncio.run(abandoned())
    cluster.close()
    assert printed == []

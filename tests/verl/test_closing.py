"""The end of a Ray cluster that this process has started, for backend ``verl`` and for host ``ray``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("opens", "closed"),
    [
        pytest.param(OF_VERL, "cluster.dead() == []", id="verl"),
        pytest.param(OF_RAY, "not ray.is_initialized()", id="ray"),
    ],
)
def test_objects_that_are_freed_meanwhile_do_not_end_the_process(model: Path, opens: str, closed: str) -> None:
    """As by answers of cancelled requests, which arrive after a server has died."""
    child = subprocess.run(
        [sys.executable, "-c", FREES_OBJECTS_WHILE_IT_CLOSES.format(opens=opens, closed=closed), str(model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert child.stdout.endswith("closed: True\n"), child.stderr[-2000:]
    assert child.returncode == 0

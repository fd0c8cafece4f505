"""Tests separated servers on eight GPUs: memory during a sync, a sync under load, and a server that dies."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cases import CASES

from rllm_core.backend import PolicyUpdate
from rllm_core.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RUNNING = 512
LEFT_MIB = 2048  # that other processes may have

ModelOf = Callable[[str], Path]


def used_mib() -> list[int]:
    """Returns the memory in use on each GPU, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


@contextmanager
def watching() -> Iterator[list[int]]:
    """Yields the highest memory in use on each GPU."""
    highest = used_mib()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            highest[:] = map(max, highest, used_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield highest
    finally:
        is_over.set()
        watcher.join()


@pytest.mark.gpu(8)
def test_the_first_sync_fits_beside_servers_with_85_percent(model_of: ModelOf) -> None:
    from live import live

    case = CASES["tight_sync"]
    with watching() as highest, live(model_of(case.shape), *case.overrides) as found:  # the first sync is in `live`
        estimate = found.backend.memory(None)
        found.publish()
    assert not isinstance(estimate, str)
    [server] = [device for device in estimate.devices if device.name == "server"]
    predicted = server.total_bytes("weight sync") / 2**20
    print({"highest_mib": highest, "predicted_mib": predicted})
    assert server.capacity_bytes is not None
    assert max(highest) <= predicted


@pytest.mark.gpu(8)
def test_a_sync_under_load_and_a_server_that_dies(model_of: ModelOf) -> None:
    import ray
    from live import live

    case = CASES["busy_sync"]
    before = used_mib()
    with live(model_of(case.shape), *case.overrides) as found:

        async def sync_under_load() -> set[tuple[int, int | None]]:
            running = asyncio.create_task(found.sample(RUNNING, 256))
            await asyncio.sleep(1)
            assert not running.done(), "the completions were over before the weights changed"
            await found.backend.on_policy_updated(PolicyUpdate(found.version + 1, found.step, "step"))
            return {(each.weight_version, each.newest_weight_version) for each in await running}

        assert (found.version, found.version + 1) in found.run(sync_under_load())
        found.version += 1

        cluster = found.backend._cluster
        assert cluster is not None
        [name] = [name for name in cluster._workers if name == "server 0"]
        ray.kill(cluster._workers[name], no_restart=True)
        with pytest.raises(UserError, match="server 0"):
            found.publish()
    after = used_mib()
    print({"before_mib": before, "after_mib": after})
    assert all(now <= earlier + LEFT_MIB for earlier, now in zip(before, after, strict=True))

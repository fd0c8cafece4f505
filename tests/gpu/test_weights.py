"""Tests the transfer of weights from trainer to servers, and the memory they share."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cases import CASES

from rllm_core.backend import PolicyUpdate

if TYPE_CHECKING:
    from live import Live

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# Both sides compute in bfloat16, each with its own kernels.
GREATEST_GAP = 0.03
STALE_OVER_SYNCED = 5
STEPS_BETWEEN_SYNCS = 2
SHARED_MEMORY = Path("/dev/shm")


def check_that_weights_arrive(live: Live) -> None:
    """Checks that trainer and servers agree after every sync, and clearly disagree before it."""
    for _ in range(3):
        synced = live.samples(16)
        assert {version for sample in synced for version in sample.weight_versions} == {live.version}
        gap = live.gap(synced)
        assert gap <= GREATEST_GAP
        for _ in range(STEPS_BETWEEN_SYNCS):
            live.train(synced)
        assert live.gap(synced) > STALE_OVER_SYNCED * max(gap, GREATEST_GAP / STALE_OVER_SYNCED)
        live.publish()


@pytest.mark.gpu(2)
def test_nccl_between_separated_trainers_and_servers(model: Path) -> None:
    from live import live

    with live(model, *CASES["separated"].overrides) as found:
        check_that_weights_arrive(found)

        async def sample_over_a_sync() -> tuple[int, int | None]:
            long = asyncio.create_task(found.sample(1, 900))
            await asyncio.sleep(0.5)
            assert not long.done(), "the completion was over before the weights changed"
            await found.backend.on_policy_updated(PolicyUpdate(found.version + 1, found.step, "step"))
            [output] = await long
            assert len(output.token_ids) == 900
            return output.weight_version, output.newest_weight_version

        assert found.run(sample_over_a_sync()) == (found.version, found.version + 1)


@contextmanager
def weights_in_shared_memory() -> Iterator[set[str]]:
    """Collects names of shared segments with weights; verl uses them where devices cannot share memory."""
    seen: set[str] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.update(path.name for path in SHARED_MEMORY.glob("verl_weights_*"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()


@pytest.mark.gpu(1)
def test_cuda_ipc_between_colocated_trainers_and_servers(model: Path) -> None:
    from live import live
    from verl.utils.device import is_support_ipc

    assert is_support_ipc()
    with live(model, *CASES["awake"].overrides) as found, weights_in_shared_memory() as seen:
        check_that_weights_arrive(found)
    assert seen == set()


@pytest.mark.gpu(1)
def test_adapters_alone_reach_servers_that_slept(model: Path) -> None:
    from live import live

    with live(model, *CASES["adapters"].overrides) as found:
        for _ in range(2):
            samples = found.samples(16)
            assert found.gap(samples) <= GREATEST_GAP
            found.run(found.backend.enter_training())
            for _ in range(STEPS_BETWEEN_SYNCS):
                found.train(samples)
            found.publish()


@pytest.mark.gpu(2)
def test_merged_adapters_reach_separated_servers(model: Path) -> None:
    from live import live

    with live(model, *CASES["merged_adapters"].overrides) as found:
        check_that_weights_arrive(found)


def used_mib() -> int:
    """Returns the memory in use on all GPUs together, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))


@pytest.mark.gpu(1)
def test_weights_above_the_bucket_are_sent_directly(model_of: Callable[[str], Path]) -> None:
    from live import live

    case = CASES["direct_send"]
    with live(model_of(case.shape), *case.overrides) as found:
        check_that_weights_arrive(found)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["sleep_without_graphs", "sleep"])
def test_servers_that_sleep_give_their_memory_back_and_wake_with_new_weights(name: str, model: Path) -> None:
    import torch
    from live import live

    share = 0.3
    with live(model, *CASES[name].overrides, f"verl.server_memory_share={share}") as found:
        reserved_mib = share * torch.cuda.get_device_properties(0).total_memory / 2**20
        for _ in range(2):
            samples = found.samples(16)
            awake = used_mib()
            found.run(found.backend.enter_training())
            asleep = used_mib()
            assert awake - asleep > 0.7 * reserved_mib
            for _ in range(STEPS_BETWEEN_SYNCS):
                found.train(samples)
            found.publish()
            assert used_mib() - asleep > 0.7 * reserved_mib
            assert found.gap(found.samples(16)) <= GREATEST_GAP

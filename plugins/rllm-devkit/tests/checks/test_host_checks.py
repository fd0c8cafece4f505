"""Tests of the checks of rollout hosts: the core's hosts pass, and each noncompliant one fails its check."""

from __future__ import annotations

import asyncio
import gc

import noncompliant_hosts as bad
import pytest

from rllm_core.hosts.contract import RolloutHost
from rllm_core.hosts.inline import Inline
from rllm_devkit.checks import check_rollout_host, hosts
from rllm_devkit.checks.hosts import ROLLOUT_HOST_CHECKS

LONG_SECONDS = 120.0
SHORT_SECONDS = 3.0  # what never happens is waited for
ENOUGH_SECONDS = 10.0  # likewise, after workers have started


@pytest.mark.slow
def test_the_process_of_the_run_passes() -> None:
    """Processes pass in `test_contracts.TestProcesses`."""
    results = asyncio.run(check_rollout_host(Inline, seconds=LONG_SECONDS))
    assert [result.name for result in results] == list(ROLLOUT_HOST_CHECKS)
    assert [result for result in results if result.outcome == "failed"] == []
    assert [result.name for result in results if result.outcome == "skipped"] == ["capacity", "lost workers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "name", "detail", "seconds"),
    [
        (bad.NotOpened, "opening", "must be opened once", LONG_SECONDS),
        (bad.OpenedTwice, "opening", "must be opened once", LONG_SECONDS),
        (bad.HidesErrors, "opening", "must say why", LONG_SECONDS),
        (bad.Speechless, "opening", "where rollouts run", LONG_SECONDS),
        (bad.WithoutRewards, "episodes", "the episode of task 'step rewards' is another", LONG_SECONDS),
        (bad.OtherForks, "episodes", "the episode of task 'forks' is another", LONG_SECONDS),
        (bad.OneError, "failures", "the episode of task 'error' is another", LONG_SECONDS),
        (bad.Shielded, "cancellation", "a rollout that was cancelled did not end", SHORT_SECONDS),
        (bad.Stubborn, "cancellation", "must raise CancelledError", LONG_SECONDS),
        (bad.Leaking, "cancellation", "1 rollouts did not end", SHORT_SECONDS),
        (bad.Boundless, "capacity", "did not wait", LONG_SECONDS),
        (bad.Forgetful, "capacity", "when one was free again", SHORT_SECONDS),
        (bad.OneByOne, "concurrency", "but 1 called the model", SHORT_SECONDS),
        (bad.Mixing, "concurrency", "is another among 32", LONG_SECONDS),
        (bad.Hasty, "settled", "is_settled must be False", LONG_SECONDS),
        (bad.Boasting, "elsewhere", "but a rollout ran in this process", LONG_SECONDS),
        (bad.Modest, "elsewhere", "runs_elsewhere is False, but", LONG_SECONDS),
        (bad.NotReplaced, "lost workers", "did not end within", ENOUGH_SECONDS),
        (bad.Uncounted, "lost workers", "no lost rollouts", LONG_SECONDS),
        (bad.Late, "lost workers", "must end as 'worker_lost'", LONG_SECONDS),
        (bad.LeavesTask, "ending", "a task still runs", LONG_SECONDS),
        (bad.LeavesChildren, "ending", "a process that it started did not end", ENOUGH_SECONDS),
    ],
)
def test_a_host_that_breaks_the_contract_is_caught(
    host: type[RolloutHost], name: str, detail: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ROLLOUT_HOST_CHECKS", {name: ROLLOUT_HOST_CHECKS[name]})
    [result] = asyncio.run(check_rollout_host(host, seconds=seconds))
    assert result.outcome == "failed", result
    assert detail in result.detail
    gc.collect()  # what the host has left open is a warning, and so an error

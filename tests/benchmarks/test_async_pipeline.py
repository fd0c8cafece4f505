"""Tests the simulation: its clock, its figures from raw rows, and a small run of the real trainer."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_pipeline, simulated, trials, virtual_clock


def run_row(
    mode: str, step_seconds: float, ages: dict[str, int], *, first: float = 0.0, deviation: float = 1.0
) -> dict[str, Any]:
    filling = [first or step_seconds] * async_pipeline.FILLING_STEPS
    return {
        "kind": "run",
        "mode": mode,
        "log_standard_deviation": deviation,
        "steps": async_pipeline.FILLING_STEPS + 2,
        "step_seconds": [*filling, step_seconds - 1, step_seconds + 1],
        "rollout_seconds_mean": 50.0,
        "groups_by_staleness": ages,
    }


def test_timers_go_off_in_order_and_hours_take_no_time() -> None:
    async def sleepers() -> list[tuple[float, int]]:
        woken = []

        async def sleeper(seconds: int) -> None:
            await asyncio.sleep(seconds)
            woken.append((time.monotonic(), seconds))

        await asyncio.gather(*(sleeper(seconds) for seconds in (7200, 60, 3600)))
        return woken

    began = time.perf_counter()
    assert virtual_clock.run(sleepers()) == [(60, 60), (3600, 3600), (7200, 7200)]
    assert time.perf_counter() - began < 60, "they were not slept through"


def test_deadlines_go_off_on_the_virtual_clock() -> None:
    async def too_late() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await asyncio.sleep(501)
        return asyncio.get_running_loop().time()

    assert virtual_clock.run(too_late()) == 500


def test_the_clock_stands_while_a_thread_works() -> None:
    async def work() -> tuple[float, bool]:
        released, woken = threading.Event(), asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, woken.set)
        thread = asyncio.create_task(asyncio.to_thread(released.wait, 30))
        for _ in range(20):
            await asyncio.sleep(0)
        threading.Timer(0.05, released.set).start()
        await thread
        now = asyncio.get_running_loop().time()
        await woken.wait()
        return now, asyncio.get_running_loop().time() == 1.0

    assert virtual_clock.run(work()) == (0.0, True)


def test_the_real_clock_is_back_afterwards() -> None:
    before = time.monotonic
    virtual_clock.run(asyncio.sleep(5))
    assert time.monotonic is before


def test_figures_leave_out_the_steps_that_fill_the_pipeline() -> None:
    rows = [
        run_row("synchronous", 600.0, {"0": 4}),
        run_row("drained_eta4", 500.0, {"4": 4}),
        run_row("in_flight_eta4", 125.0, {"3": 3, "7": 1}, first=250.0),
    ]
    no_tail = [
        run_row("synchronous", 240.0, {"0": 1}, deviation=0.0),
        run_row("one_step_off", 120.0, {"1": 1}, deviation=0.0),
    ]
    found = async_pipeline.figures([*rows, *no_tail])
    assert found["no_tail_speedup_over_sync"] == {"synchronous": 1.0, "one_step_off": 2.0}
    assert found["ideal_step_seconds"] == 120.0, "training takes longer than generating on all slots, 100 s"
    assert found["ideal_share_eta4"] == 0.96
    assert found["ideal_share_eta4_with_start"] < 0.6
    assert found["speedup_over_sync_eta4"] == 4.8
    assert found["drain_speedup_over_sync"] == 1.2
    assert found["speedup_over_sync"] == {"synchronous": 1.0, "drained_eta4": 1.2, "in_flight_eta4": 4.8}
    assert "4.80" in async_pipeline.table(rows).splitlines()[3]


def test_generation_is_the_bound_where_it_takes_longer_than_training() -> None:
    assert async_pipeline.ideal_seconds({"rollout_seconds_mean": 90.0}) == 180.0


def test_staleness_is_told_per_group() -> None:
    ages = {"0": 50, "2": 48, "10": 1, "9": 1}
    assert async_pipeline.staleness({"groups_by_staleness": ages}) == (1.15, 9, 10)


@pytest.mark.slow
def test_a_small_simulation_runs_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_pipeline, "GROUPS_PER_STEP", 4)
    monkeypatch.setattr(async_pipeline, "ROLLOUTS_PER_GROUP", 4)
    monkeypatch.setattr(async_pipeline, "SLOTS", 16)
    modes = {mode.name: mode for mode in async_pipeline.MODES}
    rows = {
        name: async_pipeline.simulate(modes[name], 20, 0, tmp_path / name)
        for name in ("synchronous", "in_flight_eta4", "strict_eta4")
    }
    synchronous, flying, strict = rows.values()
    assert all(row["rollouts"] == row["books"]["trained"] == 20 * 16 for row in rows.values())
    assert synchronous["rollout_seconds_mean"] == pytest.approx(flying["rollout_seconds_mean"])
    least = simulated.TRAIN_SECONDS + simulated.SYNC_SECONDS
    for row in rows.values():
        for step, waited in zip(row["step_seconds"], row["generation_wait_seconds"], strict=True):
            assert step == pytest.approx(least + waited, abs=0.01)
        assert sum(row["groups_by_staleness"].values()) == 80
        assert max(map(int, row["groups_by_staleness"])) == row["max_staleness_verified"]
    assert set(synchronous["groups_by_staleness"]) == {"0"}
    assert strict["max_staleness_verified"] <= 4 < flying["max_lead_groups"] <= 20
    assert statistics.fmean(flying["step_seconds"]) < statistics.fmean(synchronous["step_seconds"])


@pytest.mark.slow
def test_the_command_prints_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    for name, value in (("GROUPS_PER_STEP", 2), ("ROLLOUTS_PER_GROUP", 2), ("SLOTS", 8), ("FILLING_STEPS", 1)):
        monkeypatch.setattr(async_pipeline, name, value)
    async_pipeline.main(["--steps", "4", "--no-tail-steps", "3"])
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == async_pipeline.figures(trials.read_rows(trials.raw_path("async_pipeline")))
    assert len(printed) == 1 + sum(3 + len(modes) for modes in (async_pipeline.MODES, async_pipeline.NO_TAIL_MODES))

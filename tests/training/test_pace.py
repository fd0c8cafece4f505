"""Tests where a run spends its time: idle shares, and its speed relative to synchronous training."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rllm_devkit.scripted_plugin
from benchmarks import virtual_clock
from benchmarks.simulated import TRAIN_SECONDS, SimulationPlugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.limits.slots import Slots
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.training.pace import Pace, makespan


def simulated(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Timings of a run on a virtual clock: long-tailed rollouts of 60 s in 16 slots, 120 s of training."""
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(SimulationPlugin(), "simulation")
    settings = ("training.steps=30", "training.groups_per_step=8", "training.rollouts_per_group=4",
                "training.validation_rollouts=0", "rollout.max_concurrent_rollouts=16",
                "own_prompts.tasks=80")  # fmt: skip
    config = load_run_config("own_prompts", plugins, overrides=(*settings, *overrides), backend="simulated")
    virtual_clock.run(launch.train(assemble(config, plugins), folder, resume=False, progress=Progress()))
    return [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.slow
def test_what_is_predicted_of_the_synchronous_loop_is_what_it_takes(tmp_path: Path) -> None:
    """An asynchronous run predicts its speedup over a synchronous run that was never made."""
    synchronous = simulated(tmp_path / "synchronous")
    ahead = ("training.staleness_threshold=4", "training.partial_rollout=true")
    in_flight, draining = simulated(tmp_path / "in_flight", *ahead), simulated(tmp_path / "draining", ahead[0])
    for rows, at_least in ((in_flight, 2.0), (draining, 1.1)):
        steady = rows[10:25]
        measured = mean(synchronous, "step_seconds") / mean(steady, "step_seconds")
        assert measured > at_least
        assert steady[-1]["speedup_over_synchronous"] == pytest.approx(measured, rel=0.15)
    assert {row["speedup_over_synchronous"] for row in synchronous[:-1]} == {1.0}
    # max(g, t): training takes 120 s, and so do 32 rollouts of 60 s in 16 slots, apart from sampling noise.
    bound = mean(synchronous, "step_seconds") / TRAIN_SECONDS
    for rows in (synchronous, in_flight, draining):
        assert rows[-1]["speedup_bound"] == pytest.approx(bound, rel=0.15)
    filling = [row["speedup_bound"] is None for row in in_flight]
    assert filling == [True] * 5 + [False] * 25, (
        "as many steps as generation may be ahead, and the one it is trained in"
    )
    assert mean(in_flight[10:25], "generation_idle_share") < 0.2 < mean(draining[10:25], "generation_idle_share")
    assert mean(in_flight[10:25], "training_idle_share") < 0.2 < mean(draining[10:25], "training_idle_share")


@pytest.mark.slow
def test_the_seconds_of_a_step_are_all_accounted_for(tmp_path: Path) -> None:
    for settings in ((), ("training.staleness_threshold=1",), ("training.groups_per_forward_backward=2",)):
        for row in simulated(tmp_path / str(len(list(tmp_path.iterdir()))), "training.steps=8", *settings):
            parts = ("generation_wait_seconds", "training_seconds", "drain_seconds", "sync_seconds")
            assert sum(row[name] for name in parts) == pytest.approx(row["step_seconds"])
            assert row["training_seconds"] == pytest.approx(TRAIN_SECONDS), "and no wait for groups in between"


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=60), st.integers(1, 70))
def test_the_makespan_is_within_its_bounds(seconds: list[float], places: int) -> None:
    took = makespan(seconds, places)
    balanced = sum(seconds) / min(places, len(seconds))
    assert max(balanced, max(seconds)) <= took * (1 + 1e-9)
    assert took <= (balanced + max(seconds)) * (1 + 1e-9)
    if places >= len(seconds):
        assert took == max(seconds)
    if places == 1:
        assert took == pytest.approx(sum(seconds))


def test_the_makespan_of_jobs_in_two_waves() -> None:
    assert makespan([3.0, 1.0, 1.0, 5.0], places=2) == 7.0
    assert makespan([], places=2) == 0.0


def test_places_count_the_seconds_in_which_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def run() -> None:
        nonlocal now
        slots = Slots(2)
        async with slots.place(priority=False):
            now += 3
            async with slots.place(priority=True):
                now += 4
                assert slots.in_use == 2
                assert slots.place_seconds == 3 + 2 * 4
        now += 5
        assert slots.in_use == 0
        assert slots.place_seconds == 11
        assert slots.held == [(100.0, 7.0)], "validation has the priority, and is no part of a step"

    asyncio.run(run())


class Still:
    """Coordinator and buffer of a run in which nothing has happened."""

    in_flight, hold = 0, None

    def __len__(self) -> int:
        return 0


def test_a_step_that_took_no_time_divides_by_nothing(monkeypatch: pytest.MonkeyPatch, plugins: PluginManager) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    config = load_run_config("say_yes", plugins, overrides=(), backend="scripted")
    pace = Pace(config, colocated=False, slots=Slots(4), coordinator=Still(), buffer=Still())  # type: ignore[arg-type]
    pace.begin_step()
    timings = pace.end_step()
    assert timings["generation_idle_share"] == timings["training_idle_share"] == 0.0
    assert timings["speedup_over_synchronous"] is timings["speedup_bound"] is None


@pytest.mark.slow
def test_nothing_is_promised_where_generation_and_training_take_turns(run_scripted: Any) -> None:
    run = run_scripted(backend="scripted_colocated")
    assert {row["speedup_bound"] for row in run.lines("timings")} == {None}
    assert all(0 <= row[name] <= 1 for row in run.lines("timings") for name in row if name.endswith("_share"))


@pytest.mark.slow
def test_trackers_get_numbers_only(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rllm_core.run_folder.tracking import Trackers

    logged: list[dict[str, float]] = []
    monkeypatch.setattr(Trackers, "log", lambda self, step, metrics: logged.append(dict(metrics)))
    run = run_scripted("training.staleness_threshold=1", "training.partial_rollout=true")
    assert run.lines("timings")[0]["speedup_bound"] is None
    assert len(logged) > 6
    assert all(isinstance(value, int | float) for metrics in logged for value in metrics.values())
    assert "speedup_bound" in logged[4]

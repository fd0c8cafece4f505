"""Tests the orchestrator benchmark: figures from raw rows, its heartbeat, and tiny runs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from benchmarks import bookkeeping, orchestrator, trials


def concurrency(trial: int, wall: float, lag: float, extra: float, *, spread: bool = True) -> dict[str, Any]:
    return {
        "kind": "concurrency",
        "trial": trial,
        "spread": spread,
        "rollouts": 10_000,
        "ideal_seconds": 30.0,
        "wall_seconds": wall,
        "cpu_seconds": wall / 2,
        "lag_p99_ms": lag,
        "lag_max_ms": 2 * lag,
        "lag_p99_alone_ms": lag / 2,
        "baseline_bytes": 100_000_000,
        "peak_bytes": 100_000_000 + round(extra * 1e6),
    }


def turns(trial: int, side: str, turns: int, cpu: float, *, suspended: bool = False) -> dict[str, Any]:
    about = {"kind": "turns", "suspended": suspended, "side": side, "turns": turns, "trial": trial, "rollouts": 100}
    return {**about, "cpu_seconds": cpu}


def groups(trial: int, side: str, cpu: float) -> dict[str, Any]:
    return {"kind": "groups", "side": side, "groups": 10, "trial": trial, "cpu_seconds": cpu}


def test_figures_are_medians_beside_the_worst() -> None:
    rows = [concurrency(0, 33.0, 10.0, 90.0), concurrency(1, 30.6, 80.0, 95.0), concurrency(2, 30.9, 20.0, 110.0)]
    found = orchestrator.figures([*rows, concurrency(0, 60.0, 1.0, 1.0, spread=False)])
    assert {name: value for name, value in found.items() if "_at_once" not in name} == {
        "wall_over_ideal": 1.03,
        "wall_over_ideal_worst": 1.1,
        "loop_lag_p99_ms": 20.0,
        "loop_lag_p99_ms_worst": 80.0,
        "loop_lag_p99_ms_cpu": 10.0,
        "loop_lag_p99_ms_cpu_worst": 40.0,
        "loop_lag_max_ms": 40.0,
        "loop_lag_max_ms_worst": 160.0,
        "extra_mb": 95.0,
        "extra_mb_worst": 110.0,
        "utilisation": 0.5,
        "utilisation_worst": 0.5,
    }
    assert found["wall_over_ideal_at_once"] == 2.0


def test_a_turn_costs_what_a_long_conversation_costs_more_than_a_short_one() -> None:
    rows = []
    for trial, slow in enumerate((1.0, 1.0, 9.0)):  # the last trial was disturbed
        for side, each_turn, each_rollout in (("whole", 90e-6, 50e-6), ("completer", 70e-6, 20e-6), ("bare", 30e-6, 0)):
            for n in (2, 12):
                cpu = slow * 100 * (each_rollout + n * each_turn)
                rows += [turns(trial, side, n, cpu), turns(trial, side, n, 2 * cpu, suspended=True)]
        rows += [groups(trial, "whole", slow * 3e-3), groups(trial, "bare", slow * 1e-3)]
    expected = {
        "us_per_turn": 60.0,
        "us_per_turn_orchestration": 20.0,
        "us_per_turn_tokens_and_records": 40.0,
        "us_per_turn_engine_and_parser": 30.0,
        "us_per_rollout": 50.0,
    }
    suspended = {f"{name}_suspended": 2 * value for name, value in expected.items()}
    assert bookkeeping.figures(rows) == {**expected, **suspended, "us_per_group": 200.0}


def test_percentiles_are_values_that_were_measured() -> None:
    assert orchestrator.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert orchestrator.percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert orchestrator.percentile([7.0], 0.5) == 7.0


def test_every_beat_that_could_not_come_is_late() -> None:
    async def blocked() -> orchestrator.Pulse:
        pulse = orchestrator.Pulse()
        beating = asyncio.create_task(pulse.beat())
        await asyncio.sleep(0)
        time.sleep(0.3)  # blocks the loop, which the pulse must detect
        await asyncio.sleep(0.05)
        beating.cancel()
        return pulse

    pulse = asyncio.run(blocked())
    late = [lag for lag in pulse.lags_seconds if lag > 0.1]
    assert len(late) >= 15, "not one beat that is 0.29 s late"
    assert max(late) > 0.25
    assert pulse.peak_bytes > 1_000_000
    assert max(pulse.lags_alone_seconds) < 0.1, "it slept, and used no core"


@pytest.mark.slow
def test_a_tiny_run_is_carried_and_its_books_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "GROUPS_PER_STEP", 2)
    row = orchestrator.carry(48, 2, 0.1, spread=True)
    assert row["rollouts"] == 48
    assert row["wall_seconds"] > 0.2, "the turns follow each other"
    assert row["ideal_seconds"] == pytest.approx(0.3)
    assert row["beats"] > 10
    assert row["peak_bytes"] > 0
    assert row["lag_p50_ms"] <= row["lag_p99_ms"] <= row["lag_max_ms"]


@pytest.mark.slow
def test_a_tiny_measurement_of_the_bookkeeping_has_every_figure(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    for name, value in (("ROLLOUTS", 4), ("GROUPS", 4), ("GROUPS_PER_STEP", 2)):
        monkeypatch.setattr(bookkeeping, name, value)
    orchestrator.main(["--parts", "bookkeeping", "--bookkeeping-trials", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = trials.read_rows(trials.raw_path("orchestrator"))
    assert found == bookkeeping.figures(rows)
    assert {"us_per_turn", "us_per_turn_orchestration", "us_per_group"} <= found.keys()
    for suspended in (False, True):
        played = trials.of_kind(rows, "turns", trial=0, suspended=suspended)
        sides = [(row["side"], row["turns"]) for row in played]
        assert sorted(sides) == [(side, n) for side in ("bare", "completer", "whole") for n in (2, 12)]


@pytest.mark.parametrize("engine", [bookkeeping.ScriptedEngine, bookkeeping.SuspendingEngine])
def test_all_sides_hold_the_same_conversations(engine: Any) -> None:
    whole, completer, bare = (
        asyncio.run(side(3, engine())())
        for side in (bookkeeping.whole_rollouts, bookkeeping.completer_rollouts, bookkeeping.bare_rollouts)
    )
    assert len(whole) == len(completer) == len(bare) == bookkeeping.ROLLOUTS
    for played in ([rollout.episode for rollout in whole], completer):
        assert all(len(e.trajectories[0].steps) == 3 for e in played)
        assert all(step.break_reason is None for e in played for step in e.trajectories[0].steps)
    assert all(len(messages) == 7 for messages in bare)

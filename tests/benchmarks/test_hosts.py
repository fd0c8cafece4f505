"""Tests the benchmark of rollout hosts: figures from raw rows, its engine, and a tiny run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks import hosts, hosts_trial, trials
from benchmarks.bytes_parser import Bytes
from benchmarks.hosted_talk import compute
from rllm_core.types import SamplingParams

MEMORY = {"rss": 60.0, "pss": 40.0, "uss": 30.0}


def row(part: str, host: str, trial: int = 0, *, beside: str = "processes", **measured: Any) -> dict[str, Any]:
    about = {"kind": "trial", "part": part, "host": host, "beside": beside, "trial": trial, "rollouts": 10, "turns": 5}
    return {**about, "worker_cpu_seconds": [], **measured}


def test_speed_is_compared_with_inline_and_with_the_computations_alone() -> None:
    rows = []
    for trial, slow in enumerate((1.0, 1.0, 3.0)):  # the last trial was disturbed
        timed = {"trial": trial, "work_seconds": 0.04}
        rows.append(row("speed", "inline", **timed, wall_seconds=2.2 * slow, driver_cpu_seconds=2.0))
        rows.append(
            row(
                "speed",
                "processes",
                **timed,
                wall_seconds=1.1 * slow,
                driver_cpu_seconds=0.1,
                worker_cpu_seconds=[0.9, 1.25],
            )
        )
    assert hosts.figures(rows) == {
        "speedup_two_workers": 2.0,
        "speedup_two_workers_cpu": 1.6,  # the slower worker decides
        "wall_over_ideal": 1.1,
        "wall_over_ideal_cpu": 1.25,
    }


def test_what_a_turn_costs_the_run_is_a_slope_and_a_difference() -> None:
    rows = []
    for trial, noise in enumerate((1.0, 1.0, 5.0)):
        for host, per_turn, per_rollout in (("inline", 100e-6, 50e-6), ("processes", 130e-6, 80e-6)):
            for turns in (hosts.SHORT_TURNS, hosts.LONG_TURNS):
                seconds = noise * 10 * (per_rollout + turns * per_turn)
                measured = {"turns": turns, "driver_cpu_seconds": seconds}
                if host != "inline":
                    measured |= {"start_driver_cpu_seconds": 0.2, "start_worker_cpu_seconds": [0.3, 0.5]}
                    measured |= {"worker_memory_mb": [MEMORY, MEMORY], "messages_sent": 100, "frames_sent": 20}
                rows.append(row("driver", host, trial, **measured))
    assert hosts.figures(rows) == {
        "driver_us_per_turn_over_inline_us": 30.0,
        "driver_us_per_turn": 130.0,
        "inline_us_per_turn": 100.0,
        "driver_us_per_rollout_over_inline_us": 30.0,
        "messages_per_frame": 5.0,
        "start_seconds_per_worker": 0.5,
        "worker_mb": 60.0,
        "worker_mb_pss": 40.0,
        "worker_mb_uss": 30.0,
    }


@pytest.mark.parametrize(("more_bytes", "more_cpu", "expected"), [(1.0, 1.1, 1.1), (1.4, 1.1, 1.4)])
def test_the_length_figure_is_the_largest_ratio(more_bytes: float, more_cpu: float, expected: float) -> None:
    def by_turn(cpu: float, crossed: int) -> list[dict[str, Any]]:
        entries, seconds, total = [], 0.0, 0.0
        for turn in range(1, 105):
            entries.append(
                {
                    "turn": turn,
                    "driver_cpu_seconds": seconds,
                    "worker_cpu_seconds": [seconds, seconds] if crossed else [],
                    "bytes_sent": round(total),
                    "bytes_received": round(total),
                }
            )
            late = turn > 50
            seconds += cpu * (more_cpu if late and crossed else 1.0)
            total += crossed * (more_bytes if late else 1.0)
        return entries

    rows = [
        row("length", "inline", by_turn=by_turn(0.0, 0)),
        row("length", "processes", by_turn=by_turn(1e-3, 5000)),
    ]
    found = hosts.figures(rows)
    assert found["turn100_over_turn5"] == expected
    assert (found["turn100_over_turn5_bytes"], found["turn100_over_turn5_cpu"]) == (more_bytes, more_cpu)
    assert found["turn100_over_turn5_workers_cpu"] == more_cpu
    assert found["turn5_bytes"] == 1000.0
    assert found["turn5_us_over_inline_us"] == pytest.approx(300.0)


def test_hosts_are_compared_with_the_inline_trials_beside_them() -> None:
    timed = {"work_seconds": 0.04, "driver_cpu_seconds": 1.0}
    rows = [
        row("speed", "inline", wall_seconds=4.0, **timed),
        row("speed", "processes", wall_seconds=2.0, **timed),
        row("speed", "inline", beside="ray", wall_seconds=9.0, **timed),
        row("speed", "ray", beside="ray", wall_seconds=3.0, **timed),
        row("lag", "ray", beside="ray", lag_p99_ms=7.0, lag_p99_alone_ms=3.0, lag_max_ms=9.0),
    ]
    found = hosts.figures(rows)
    assert (found["speedup_two_workers"], found["ray_speedup_two_workers"]) == (2.0, 3.0)
    assert found["ray_lag_p99_ms"] == 7.0
    assert "lag_p99_ms" not in found


def test_turns_begin_together_when_all_have_called_the_engine() -> None:
    begun: list[int] = []
    params = SamplingParams(stop_token_ids=(Bytes.END,), max_response_tokens=400)

    async def play() -> list[int]:
        engine = hosts_trial.Measured(3, begun.append)

        async def rollout(seed: int, pauses: int) -> None:
            for _ in range(2):
                for _ in range(pauses):
                    await asyncio.sleep(0)
                [output] = await engine.get_token_outputs_from_token_input([1], sampling_params=params, seeds=[seed])
                assert bytes(output.token_ids[:-1].tolist()).decode() == hosts_trial.ANSWER

        await asyncio.gather(*(rollout(seed, pauses=7 * seed) for seed in range(3)))
        return begun

    assert asyncio.run(play()) == [1, 2]


def test_a_computation_takes_its_cpu_time() -> None:
    before = hosts_trial.time.thread_time()
    compute(0.02)
    assert hosts_trial.time.thread_time() - before >= 0.02


@pytest.mark.slow
def test_a_tiny_measurement_has_every_figure(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    monkeypatch.setattr(hosts, "LATE_TURN", 10)
    options = ["--no-ray", "--trials", "1", "--turns", "1", "--rollouts", "4", "--lag-rollouts", "8"]
    hosts.main([*options, "--lag-turns", "2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = trials.read_rows(trials.raw_path("hosts"))
    assert found == hosts.figures(rows)
    documented = {"speedup_two_workers", "wall_over_ideal", "driver_us_per_turn_over_inline_us", "turn100_over_turn5"}
    assert documented | {"start_seconds_per_worker", "worker_mb", "lag_p99_ms"} <= found.keys()
    for played in trials.of_kind(rows, "trial", host="processes"):
        assert sum(played["worker_cpu_seconds"]) >= played["rollouts"] * played["turns"] * played["work_seconds"]
        assert played["messages_received"] >= played["rollouts"] * (played["turns"] + 1)  # its calls and its end

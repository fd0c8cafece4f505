"""Tests that figures are functions of the raw trials."""

from __future__ import annotations

from typing import Any

from benchmarks import supervised


def taught(mode: str, seed: int, solved: float) -> dict[str, Any]:
    about = {"kind": "distill", "mode": mode, "seed": seed, "solved_before": 0.01 * seed, "solved": solved}
    return {**about, "cpu_seconds": 10.0 + seed}


def test_each_part_is_as_good_as_its_worst_seed() -> None:
    learned = [
        {"kind": "sft", "seed": seed, "nll_after": nll, "nll_of_grammar": 1.2, "entropy": 1.25, "cpu_seconds": 30.0}
        for seed, nll in ((0, 1.26), (1, 1.275))
    ]
    teachers = [{"kind": "teacher", "seed": seed, "solved": 0.98 + 0.01 * seed} for seed in (0, 1)]
    students = [taught("synchronous", 0, 0.95), taught("synchronous", 1, 0.93), taught("asynchronous", 0, 0.9)]
    found = supervised.figures([*learned, *teachers, *students])
    assert found["sft_over_entropy"] == 1.02
    assert found["sft_over_grammar"] == 1.0625
    assert found["distill_solved_min"] == 0.93
    assert found["distill_async_solved_min"] == 0.9
    assert found["distill_cpu_seconds_max"] == 11.0
    assert found["distill_solved_before_max"] == 0.01
    assert found["teacher_solved_min"] == 0.98


def test_parts_that_were_not_measured_have_no_figures() -> None:
    assert supervised.figures([]) == {}
    assert "distill_solved_min" not in supervised.figures(
        [taught("asynchronous", 0, 0.9), {"kind": "teacher", "solved": 1.0}]
    )

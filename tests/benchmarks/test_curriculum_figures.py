"""Tests the figures of `benchmarks.curriculum` on rows whose figures can be told by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.curriculum import figures, is_decided


def trial(arm: str, seed: int, *curve: tuple[int, float]) -> dict[str, Any]:
    points = [{"step": 10 * at, "rollouts": rollouts, "solved": solved} for at, (rollouts, solved) in enumerate(curve)]
    return {"kind": "training", "arm": arm, "seed": seed, "curve": points}


def test_rollouts_are_those_of_the_first_validation_that_reaches_the_target() -> None:
    rows = [
        trial("uniform", 1, (0, 0.0), (5000, 0.5), (10_000, 0.96), (15_000, 1.0)),
        trial("difficulty", 1, (0, 0.0), (4000, 0.4), (5000, 0.95)),
        trial("pools", 1, (0, 0.0), (10_000, 0.9)),
        trial("uniform", 2, (0, 0.0), (8000, 0.8)),
        trial("difficulty", 2, (0, 0.0), (8000, 0.7), (12_000, 0.8)),
    ]
    found = figures(rows)
    assert found["targets"] == [0.95, 0.76]
    assert found["rollouts_over_uniform_by_seed"] == [0.5, 1.5]
    assert found["rollouts_over_uniform"] == 1.0
    assert (found["rollouts_over_pools"], found["not_reached"]) == (0.5, ["pools 1"])
    assert found["uniform_solved_after"] == {5000: 0.5, 10_000: 0.88, 15_000: 0.9}


def test_a_trial_is_over_at_the_target_or_when_it_has_used_as_much_as_uniform() -> None:
    uniform = {"rollouts": 9000, "solved": 0.8}
    assert not is_decided([], uniform)
    assert not is_decided([{"rollouts": 8999, "solved": 0.75}], uniform)
    assert is_decided([{"rollouts": 5000, "solved": 0.76}, {"rollouts": 6000, "solved": 0.7}], uniform)
    assert is_decided([{"rollouts": 9000, "solved": 0.1}], uniform)

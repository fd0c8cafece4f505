"""The pure parts of `benchmarks.gpu`; nothing else of it can run without a GPU, except for ``--tiny-cpu``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, sides

SIDE = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"ready": {}}), flush=True)
    for step in range(1, request["steps"] + 1):
        sys.stdin.readline()
        if step == request["hangs_at"]:
            time.sleep(600)
        if step == request["fails_at"]:
            sys.exit(3)
        row = {"step": step, "of": os.environ["RLLM_BENCHMARK_SIDE"], "wall_seconds": 1.0}
        print(json.dumps({"step": row}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"result": {}}), flush=True)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every side run `SIDE`."""
    (tmp_path / "scripted_side.py").write_text(SIDE, encoding="utf-8")
    monkeypatch.setattr(sides, "ROOT", tmp_path)
    for side in gpu.MODULES:
        monkeypatch.setitem(gpu.MODULES, side, "scripted_side")


class Trials:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def steps(side: str, seconds: list[float], **counts: Any) -> list[dict[str, Any]]:
    rows = [{"step": number, "wall_seconds": value, **counts} for number, value in enumerate(seconds, 1)]
    return [{"kind": "step", "side": side, "gpu_memory_mb": 1000 * row["step"], **row} for row in rows]


def test_a_side_gets_an_equal_part_of_the_time_that_is_left() -> None:
    assert 3 * gpu.seconds_per_side(10, 3) + gpu.RESERVED_SECONDS == pytest.approx(600)
    times = iter([0.0, 20.0, 400.0, 700.0])  # the first side needs less than its part, and the third takes too long
    found = list(gpu.turns(["local", "trl", "verl", "main_ppo"], 600.0, lambda: next(times)))
    assert found == [
        gpu.Turn("local", 150.0), gpu.Turn("trl", 580 / 3), gpu.Turn("verl", 100.0), gpu.Turn("main_ppo", 0.0)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="leaves no time for 3 sides"):
        gpu.seconds_per_side(0.5, 3)


def test_figures_leave_out_warm_up_and_name_what_failed() -> None:
    rows = [
        *steps("local", [90, 90, 2, 4, 3], sampled_tokens=300),
        *steps("trl", [50, 1, 6, 6, 9], sampled_tokens=300),
        *steps("verl", [9, 9, 5, 5]),
        {"kind": "failed", "side": "main_ppo", "reason": "side main_ppo ended with exit code 1"},
    ]
    found = gpu.figures(rows)
    assert found == {
        "local_steps_per_second_over_trl": 2.0,
        "timed_steps": {"local": 3, "trl": 3, "verl": 2},
        "step_ms": {"local": 3000, "trl": 6000, "verl": 5000},
        "tokens_per_second": {"local": 100, "trl": 50},
        "gpu_memory_mb": {"local": 5000, "trl": 5000, "verl": 4000},
        "failed": {"main_ppo": "side main_ppo ended with exit code 1"},
    }
    both = gpu.figures([*rows[:-1], *steps("main_ppo", [1, 1, 4, 4])])
    assert both["verl_seconds_per_step_over_main_ppo"] == 1.25
    assert "failed" not in both
    assert gpu.figures(steps("trl", [1, 1, 4], sampler="vllm"))["trl_sampler"] == "vllm"
    assert gpu.figures(steps("local", [1.0, 1.0])) == {
        "timed_steps": {}, "step_ms": {}, "tokens_per_second": {}, "gpu_memory_mb": {}
    }  # fmt: skip


def test_every_side_is_asked_for_the_same_model() -> None:
    asked = [gpu.request_of(side, Path("/model"), "cuda", "127.0.0.1:1") for side in gpu.MODULES]
    assert {request["model"] for request in asked} == {"/model"}
    assert {request.get("workload", request.get("name")) for request in asked} == {"gpu"}
    assert [request.get("side") for request in asked] == [None, None, "ours", "main_ppo"]
    tiny = gpu.request_of("trl", Path("/model"), "cpu", "")
    assert (tiny["workload"], tiny["sampler"]) == ("gpu_tiny", "transformers")
    assert [
        gpu.request_of("trl", Path("/model"), "cuda", "", *given)["sampler"] for given in ((), ("transformers",))
    ] == [
        "vllm",
        "transformers",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("hangs_at", "fails_at", "seconds", "timed", "reason"),
    [
        (0, 0, 60, gpu.MAX_STEPS, None),
        (4, 0, 3, 1, None),
        (1, 0, 3, 0, "no time left after 0 steps; use --minutes"),
        (0, 5, 60, 2, "ended with exit code 3"),
    ],
)
def test_a_side_that_fails_or_hangs_ends_in_time(
    hangs_at: int,
    fails_at: int,
    seconds: float,
    timed: int,
    reason: str | None,
) -> None:
    trials: Any = Trials()
    request = {"steps": gpu.WARM_UP_STEPS + gpu.MAX_STEPS, "device": "cpu", "hangs_at": hangs_at, "fails_at": fails_at}
    gpu.train(gpu.Turn("local", seconds), request, sys.executable, trials)
    assert sum(row["kind"] == "step" and row["step"] > gpu.WARM_UP_STEPS for row in trials.rows) == timed
    assert {row["of"] for row in trials.rows if row["kind"] == "step"} <= {"local"}  # verl's sides read it
    failed = [row["reason"] for row in trials.rows if row["kind"] == "failed"]
    assert len(failed) == (reason is not None)
    assert reason is None or reason in failed[0]


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("fails_at", "hangs_at", "seconds", "timed", "reason"),
    [
        (0, 0, 60, gpu.MAX_STEPS, None),
        (0, 5, 4, 2, None),
        (0, 1, 4, 0, "no time left after 0 steps; use --minutes"),
        (2, 0, 60, 0, "ended with exit code 3"),
        (5, 0, 60, 2, "ended with exit code 3"),
    ],
)
def test_sides_that_alternate_end_in_time(
    fails_at: int,
    hangs_at: int,
    seconds: float,
    timed: int,
    reason: str | None,
) -> None:
    trials: Any = Trials()
    asked = {"steps": gpu.WARM_UP_STEPS + gpu.MAX_STEPS, "device": "cpu", "hangs_at": 0, "fails_at": 0}
    requests = {"verl": asked, "main_ppo": {**asked, "hangs_at": hangs_at, "fails_at": fails_at}}
    gpu.train_in_turns(requests, dict.fromkeys(requests, sys.executable), seconds, trials)
    steps = [row for row in trials.rows if row["kind"] == "step" and row["step"] > gpu.WARM_UP_STEPS]
    order = [row["side"] for row in steps if row["step"] <= gpu.WARM_UP_STEPS + timed]
    assert order == (["verl", "main_ppo", "main_ppo", "verl"] * gpu.MAX_STEPS)[: 2 * timed]
    assert {row["of"] == row["side"] for row in steps} <= {True}
    failed = [row["reason"] for row in trials.rows if row["kind"] == "failed"]
    assert len(failed) == (0 if reason is None else 2)
    assert reason is None or reason in failed[0]


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [gpu.NO_GPU]
    with pytest.raises(SystemExit):
        gpu.main(["--tiny-cpu", "--sides", "verl"])
    assert "--tiny-cpu trains only the sides local and trl" in capsys.readouterr().err

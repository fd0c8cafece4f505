"""Tests the main use case with its real parts: starter model, torch, transformers, command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rllm_core.run_folder import checkpoint

pytestmark = pytest.mark.slow

SMALL = ("training.steps=12", "training.groups_per_step=4", "training.rollouts_per_group=4",
         "training.validation_rollouts=16", "training.checkpoint_every_steps=3")  # fmt: skip


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rllm_core", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], *, code: int = 0) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    return out


def train(workflow: str, run_dir: Path, *overrides: str, resume: bool = False) -> subprocess.Popen[str]:
    options = [argument for override in overrides for argument in ("-o", override)]
    return start("train", workflow, "--run-dir", str(run_dir), *options, *(["--resume"] if resume else []))


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_sort_is_learned_from_chance_to_mastery(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    out = finish(train("sort", run_dir))
    assert out.splitlines()[-1] == f"run: {run_dir}"
    assert "first validation (step 0)" in out
    summary = summary_of(run_dir)
    first, last = summary["validation"][0], summary["validation"][-1]
    assert first["step"] == 0
    assert first["rollouts"] == last["rollouts"] == 512
    assert first["solved"] <= 0.1
    assert last["solved"] >= 0.95
    assert summary["status"] == "completed"
    books = summary["books"]
    assert books["dispatched"] == books["trained"] == summary["planned_steps"] * 256
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["rollout_logprob_difference_max"] for row in rows) < 1e-4
    assert all(row["segment_breaks"] == 0 for row in rows)

    measured = json.loads(
        finish(start("eval", "sort", "--checkpoint", str(run_dir), "--tasks", "100", "-n", "4", "--json"))
    )
    [pass_1, pass_4] = measured["pass_at_k"]
    assert pass_1["value"] >= 0.9
    assert pass_1["low"] <= pass_1["value"] <= pass_1["high"]
    assert pass_4["value"] >= pass_1["value"]
    trained_model = checkpoint.complete(run_dir / "checkpoints")[-1] / "backend"
    exported = json.loads(
        finish(start("eval", "sort", "--model", str(trained_model), "--tasks", "100", "-n", "4", "--json"))
    )
    assert exported["pass_at_k"] == measured["pass_at_k"], "a checkpoint is an ordinary model folder"


def test_guess_is_learned_over_several_turns_each_one_segment(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish(train("guess", run_dir))
    summary = summary_of(run_dir)
    assert summary["validation"][0]["solved"] <= 0.35
    assert summary["validation"][-1]["solved"] >= 0.9
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["turns_mean"] > 1
    assert sum(row["segment_breaks"] for row in rows) == 0
    assert all(row["samples"] == row["trajectories"] for row in rows), "a game is one training sample"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(train("sort", run_dir, *SMALL))
    return run_dir


def test_same_seed_same_bytes(tmp_path: Path, uninterrupted: Path) -> None:
    finish(train("sort", tmp_path / "run", *SMALL))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, uninterrupted: Path, how: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    process = train("sort", run_dir, *SMALL)
    deadline = time.monotonic() + 120
    while not checkpoint.complete(run_dir / "checkpoints"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=120)
    assert process.returncode == (-9 if how is signal.SIGKILL else 130)
    newest = int(checkpoint.complete(run_dir / "checkpoints")[-1].name[5:])
    assert newest < 12
    finish(train("sort", run_dir, *SMALL, resume=True))
    assert summary_of(run_dir)["resumed_from_step"] == newest
    assert (run_dir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert summary_of(run_dir)["validation"] == summary_of(uninterrupted)["validation"]

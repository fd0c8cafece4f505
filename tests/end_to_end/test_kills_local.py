"""Tests kill -9 with the real backend: torch, its checkpoints and its child processes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from forked import Forks

from rllm_core.run_folder import checkpoint
from rllm_viewer.verify import verify

pytestmark = pytest.mark.slow

KILLS, STEPS = 10, 4
SMALL = (f"training.steps={STEPS}", "training.groups_per_step=2", "training.rollouts_per_group=4",
         "training.validation_rollouts=4", "training.checkpoint_every_steps=1")  # fmt: skip


def train(forking: Forks, run_dir: Path, seconds: float | None = None) -> tuple[int, list[int]]:
    """Trains, or is killed after some seconds; returns the exit code, and what a killed run had started."""
    resume = ["--resume"] if (run_dir / "run.toml").exists() else []
    options = [argument for override in SMALL for argument in ("-o", override)]
    arguments = ["train", "sort", "--run-dir", str(run_dir), *options, *resume]
    process = forking.start(arguments, output=run_dir.with_name(f"output of {run_dir.name}"))
    if seconds is None:
        return process.wait(), []
    time.sleep(seconds)
    children = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    return process.wait(), children


def children_of(pid: int) -> list[int]:
    started = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            started += (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended since it was listed
    return [int(child) for child in started]


def assert_gone(children: list[int]) -> None:
    deadline = time.monotonic() + 600
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} outlived the run that started them"
        time.sleep(0.05)


def test_killed_ten_times_and_resumed_equals_uninterrupted(forking: Forks, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert train(forking, whole)[0] == 0
    began = time.monotonic()
    assert train(forking, tmp_path / "timed")[0] == 0
    seconds = time.monotonic() - began
    generator = random.Random("kills of local")
    kills, runs = 0, 0
    while kills < KILLS:
        run_dir, last_step = tmp_path / f"run-{runs}", 0
        runs += 1
        while (ended := train(forking, run_dir, generator.uniform(0, seconds) if kills < KILLS else None))[0]:
            code, children = ended
            assert code == -signal.SIGKILL
            assert_gone(children)
            kills += 1
            complete = checkpoint.complete(run_dir / "checkpoints")
            step = checkpoint.read(complete[-1])["step"] if complete else 0
            assert step >= last_step, "a checkpoint was lost"
            last_step = step
        proven = verify(run_dir)
        assert (proven.problems, proven.steps) == ([], STEPS)
        assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()

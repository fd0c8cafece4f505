"""Tests kill -9 with the real backend: torch, its checkpoints and its child processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm_core.run_folder import checkpoint
from rllm_viewer.verify import verify

pytestmark = pytest.mark.slow

KILLS, STEPS = 10, 4
SMALL = (f"training.steps={STEPS}", "training.groups_per_step=2", "training.rollouts_per_group=4",
         "training.validation_rollouts=4", "training.checkpoint_every_steps=1")  # fmt: skip

# A process with everything imported, no computation and no threads: a run costs a fork, not an interpreter start.
SERVER = """
import json, os, signal, sys, time
import rllm_local.backend
from rllm_core.cli import main

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        code = 1
        try:
            main(request["arguments"])
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    started = []
    if request["seconds"] is not None:
        time.sleep(request["seconds"])
        for path in os.listdir(f"/proc/{child}/task"):
            try:
                started += open(f"/proc/{child}/task/{path}/children").read().split()
            except FileNotFoundError:
                pass  # the thread has ended since it was listed
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    answer = {"code": os.waitstatus_to_exitcode(status), "children": [int(pid) for pid in started]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield process
    process.communicate(timeout=60)
    assert process.returncode == 0


def train(server: subprocess.Popen[str], run_dir: Path, seconds: float | None = None) -> dict[str, Any]:
    resume = ["--resume"] if (run_dir / "run.toml").exists() else []
    options = [argument for override in SMALL for argument in ("-o", override)]
    arguments = ["train", "sort", "--run-dir", str(run_dir), *options, *resume]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"arguments": arguments, "seconds": seconds}) + "\n")
    server.stdin.flush()
    answer: dict[str, Any] = json.loads(server.stdout.readline())
    return answer


def assert_gone(children: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} outlived the run that started them"
        time.sleep(0.05)


def test_killed_ten_times_and_resumed_equals_uninterrupted(server: subprocess.Popen[str], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert train(server, whole)["code"] == 0
    began = time.monotonic()
    assert train(server, tmp_path / "timed")["code"] == 0
    seconds = time.monotonic() - began
    generator = random.Random("kills of local")
    kills, runs = 0, 0
    while kills < KILLS:
        run_dir, last_step = tmp_path / f"run-{runs}", 0
        runs += 1
        while (answer := train(server, run_dir, generator.uniform(0, seconds) if kills < KILLS else None))["code"]:
            assert answer["code"] == -signal.SIGKILL
            assert_gone(answer["children"])
            kills += 1
            complete = checkpoint.complete(run_dir / "checkpoints")
            step = checkpoint.read(complete[-1])["step"] if complete else 0
            assert step >= last_step, "a checkpoint was lost"
            last_step = step
        proven = verify(run_dir)
        assert (proven.problems, proven.steps) == ([], STEPS)
        assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()

"""Measures the speed of whole runs; prints one JSON object per run and asserts nothing about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

COMMAND = Path(sys.executable).with_name("rllm-core")
RUN_SECONDS = 1200
STEPS, WARM_UP_STEPS = 12, 4
RUN = (
    f"training.steps={STEPS}",
    "training.groups_per_step=16",
    "training.rollouts_per_group=16",
    "rollout.max_response_tokens=512",
    "verl.max_model_tokens=1024",
    "verl.max_tokens_per_device=32768",
)
SEPARATED = ("verl.placement=separated", "verl.checkpoint_engine=nccl", "verl.server_memory_share=0.8")
ASYNCHRONOUS = ("training.staleness_threshold=1", "training.partial_rollout=true")
TIMES = ("step_seconds", "generation_wait_seconds", "training_seconds", "sync_seconds", "tokens_per_second")


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("colocated", (), marks=pytest.mark.gpu(1)),
        pytest.param("separated", SEPARATED, marks=pytest.mark.gpu(2)),
        pytest.param("asynchronous", (*SEPARATED, *ASYNCHRONOUS), marks=pytest.mark.gpu(2)),
    ],
)
def test_a_whole_run(name: str, settings: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [COMMAND, "train", "sort", "--backend", "verl", "--parser", "chat_template", "--run-dir", run]
    for override in (f"model.path={model}", *RUN, *settings):
        command += ["-o", override]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    verified = subprocess.run([COMMAND, "verify", run], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout
    timings, metrics = lines(run, "timings")[WARM_UP_STEPS:], lines(run, "metrics")
    assert len(metrics) == STEPS
    figures = {time: median(line[time] for line in timings) for time in TIMES}
    figures["sync_logprob_difference_max"] = max(line["sync_logprob_difference_max"] for line in metrics)
    figures["trainer_memory_gb"] = max(line["trainer_memory_gb"] for line in metrics)
    print(json.dumps({"run": name, "steps": len(timings)} | figures))

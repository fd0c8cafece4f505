"""Runs the commands: a run with every term of the loss, resuming, verifying, exporting; and backend ``local``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import WHOLE_RUN

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

COMMAND = Path(sys.executable).with_name("rllm-core")
RUN_SECONDS = 900
LOCAL_STEPS = 20
# Between the sampler and the trainer, of the worst token.
GREATEST_GAP = {"float32": 1e-2, "bfloat16": 0.5}


def rllm_core(*arguments: str | Path) -> str:
    command = [COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def options(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("-o", override)]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.gpu(1)
def test_every_term_of_the_loss_then_resume_and_export(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = options(f"model.path={model}", *WHOLE_RUN)
    rllm_core("train", "sort", "--backend", "verl", "--parser", "chat_template", "--run-dir", run, *settings)
    for line in metrics(run):
        assert line["grad_norm"] > 0
        assert line["entropy"] > 0
    rllm_core("train", "--resume", "--run-dir", run, "-o", "training.steps=4")
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    rllm_core("verify", run)
    exported = tmp_path / "exported"
    rllm_core("export-model", run, exported)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(exported)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_local_trains_on_a_gpu(dtype: str, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = options(
        f"model.path={model}",
        f"training.steps={LOCAL_STEPS}",
        "training.groups_per_step=8",
        "training.rollouts_per_group=8",
        "training.validation_rollouts=0",
        "rollout.max_response_tokens=64",
        "algorithm.entropy_coefficient=0.01",
        "local.device=cuda",
        f"local.dtype={dtype}",
        "local.max_batch_tokens=2048",
    )
    printed = rllm_core("train", "sort", "--backend", "local", "--run-dir", run, *settings)
    found = metrics(run)
    speeds = [json.loads(line)["tokens_per_second"] for line in (run / "timings.jsonl").read_text().splitlines()]
    gaps = [line["rollout_logprob_difference_max"] for line in found if "rollout_logprob_difference_max" in line]
    figures = {
        "uses_fused_decoder": "fused decoder disagrees" not in printed,
        "tokens_per_second": speeds[len(speeds) // 2],
        "rollout_logprob_difference_max": max(gaps),
    }
    print(json.dumps({"dtype": dtype} | figures))
    assert len(found) == LOCAL_STEPS
    assert max(gaps) <= GREATEST_GAP[dtype]

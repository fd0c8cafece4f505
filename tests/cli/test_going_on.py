"""Tests going on from a run: with its weights in a new run, and with more steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from in_process import run_in_process

from rllm_viewer.verify import verify

SMALL = ("groups_per_step=2", "rollouts_per_group=4", "validation_rollouts=4", "checkpoint_every_steps=2")
LOCAL = ["sort", "--backend", "local", *[word for setting in SMALL for word in ("-o", f"training.{setting}")]]


def run(folder: Path, *arguments: str) -> Any:
    return run_in_process(list(arguments), folder=folder, environment=os.environ)


def trained(folder: Path, name: str, steps: int, *more: str, target: tuple[str, ...] = tuple(LOCAL)) -> Path:
    done = run(folder, "train", *target, "--run-dir", name, "-o", f"training.steps={steps}", *more)
    assert done.returncode == 0, done.stderr
    return folder / name


def evaluated(folder: Path, *arguments: str) -> Any:
    done = run(folder, "eval", *arguments, "--tasks", "8", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ("-o", "local.lora.rank=4", "-o", "optimizer.learning_rate=0.01")])
def test_a_new_run_has_the_weights_of_another_one(tmp_path: Path, adapters: tuple[str, ...]) -> None:
    trained(tmp_path, "first", 4, *adapters)
    started_from = ("--init-from", "first:2", *adapters)
    dry = run(tmp_path, "train", *LOCAL, *started_from, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    shown = json.loads(dry.stdout)
    assert shown["resolved"]["training"]["init_from"] == f"{tmp_path / 'first'}:2"
    assert f"starts from the weights of {tmp_path / 'first'} after step 2" in shown["notes"]

    second = trained(tmp_path, "second", 1, *started_from, "-o", "optimizer.learning_rate=1e-30")
    assert verify(second).problems == []
    of_checkpoint = evaluated(tmp_path, "--checkpoint", "first/checkpoints/step-000002")
    assert evaluated(tmp_path, "--checkpoint", "second") == of_checkpoint
    assert evaluated(tmp_path, *LOCAL[:3], "-o", "training.init_from=first:2", *adapters) == of_checkpoint
    saved = [(path / "backend").rglob("*model.safetensors") for path in (
        tmp_path / "first/checkpoints/step-000002", second / "checkpoints/step-000001"
    )]  # fmt: skip
    ours, theirs = [[file.read_bytes() for file in files] for files in saved]
    assert ours
    assert ours == theirs


@pytest.mark.slow
def test_more_steps_give_the_metrics_of_a_run_planned_longer(tmp_path: Path) -> None:
    constant = ("-o", "optimizer.schedule=constant", "-o", "algorithm.kl.coefficient=0.1")
    whole = trained(tmp_path, "whole", 5, *constant)
    run_dir = trained(tmp_path, "run", 3, *constant)
    trained(tmp_path, "run", 5, "--resume", target=())
    assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["planned_steps"], summary["optimizer_steps"]) == ("completed", 5, 5)
    assert verify(run_dir).problems == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume", "--run-dir", "run", "--init-from", "x"], "error: --init-from starts a new run"),
        (["train", "sort", "--init-from", "nothing", "--run-dir", "run"], "error: training.init_from = "),
        (["train", "sort", "--init-from", "nothing", "--dry-run"], "error: training.init_from = "),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()

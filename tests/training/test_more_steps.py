"""Tests resumes that plan more optimizer steps than before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.run_folder.folder import RunDir
from rllm_viewer.verify import verify

if TYPE_CHECKING:  # at run time, the name is another folder's conftest where several are collected
    from conftest import RunScripted

LINEAR = "optimizer.schedule=linear"
ENTROPY = ("algorithm.entropy_coefficient=0.1", "algorithm.entropy_coefficient_final=0.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "first", "more"),
    [
        ("scripted", 3, ()),
        ("scripted_colocated", 3, ("training.checkpoint_every_steps=2", "training.validate_every_steps=2")),
        ("scripted_colocated", 4, ("training.trigger_parameter_sync_step=2",)),
        ("scripted", 3, ("algorithm.entropy_coefficient=0.1", "algorithm.entropy_coefficient_final=0.1")),
        ("scripted", 0, ()),
    ],
)
def test_the_metrics_are_those_of_a_run_planned_longer(
    run_scripted: RunScripted, tmp_path: Path, backend: str, first: int, more: tuple[str, ...]
) -> None:
    whole = run_scripted(*more, "training.steps=8", path=tmp_path / "whole", backend=backend)
    short = run_scripted(*more, f"training.steps={first}", path=tmp_path / "run", backend=backend)
    assert (short.summary["status"], short.summary["planned_steps"]) == ("completed", first)
    longer = run_scripted(*more, "training.steps=8", path=tmp_path / "run", backend=backend, resume=True)
    assert (longer.summary["status"], longer.summary["planned_steps"]) == ("completed", 8)
    assert longer.summary["optimizer_steps"] == 8
    assert (longer.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
    validated = {validation["step"] for validation in whole.summary["validation"]}
    assert {validation["step"] for validation in longer.summary["validation"]} == validated | {first}
    assert verify(longer.path).problems == []


@pytest.mark.slow
def test_a_sync_at_the_first_planned_end_stays_and_is_verified(run_scripted: RunScripted, tmp_path: Path) -> None:
    every_other = "training.trigger_parameter_sync_step=2"
    run_scripted(every_other, "training.steps=3", path=tmp_path / "run")
    longer = run_scripted(every_other, "training.steps=6", path=tmp_path / "run", resume=True)
    syncs = [event["step"] for event in longer.lines("events") if event["event"] == "sync"]
    assert syncs == [0, 2, 3, 3, 4, 6]
    assert verify(longer.path).problems == []


@pytest.mark.slow
def test_a_completed_run_resumed_with_the_same_steps_stays_complete(run_scripted: RunScripted) -> None:
    run = run_scripted()
    metrics = (run.path / "metrics.jsonl").read_bytes()
    again = run_scripted(resume=True)
    assert (again.summary["status"], again.summary["optimizer_steps"]) == ("completed", 6)
    assert (again.path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "key"), [((LINEAR,), "optimizer.schedule"), (ENTROPY, "entropy_coefficient_final")]
)
def test_a_schedule_over_the_whole_run_forbids_it(
    run_scripted: RunScripted, settings: tuple[str, ...], key: str
) -> None:
    run = run_scripted(*settings)
    assert run.error is None
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    config = load_run_config(str(run.path / "run.toml"), run.assembly.plugins, overrides=["training.steps=9"])
    with pytest.raises(ConfigError, match=f"from 6 to 9.*{key}.*--init-from {run.path}"):
        RunDir(run.path, config, resume=True)
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_fewer_steps_are_refused_with_those_done(run_scripted: RunScripted, tmp_path: Path) -> None:
    run = run_scripted("training.checkpoint_every_steps=2", "training.keep_checkpoints=9")
    shutil.rmtree(run.path / "checkpoints" / "step-000006")
    config = load_run_config(str(run.path / "run.toml"), run.assembly.plugins, overrides=["training.steps=5"])
    with pytest.raises(ConfigError, match=r"training\.steps = 5 is less than the 6 planned steps.*has done 4"):
        RunDir(run.path, config, resume=True)

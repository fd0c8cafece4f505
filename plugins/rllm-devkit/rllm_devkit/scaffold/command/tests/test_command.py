"""Tests of the command: contract and output."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result
from rllm_core.errors import UserError
from rllm_devkit.contracts import CommandContract

from rllm_placeholder.command import command


class TestContract(CommandContract):
    """Checks that the command can be loaded and has help."""

    name = "placeholder"


def called(run_dir: Path) -> Result:
    return CliRunner().invoke(command, [str(run_dir)])


def test_a_line_per_step(tmp_path: Path) -> None:
    steps = [{"step": 1, "reward_mean": 0.1}, {"step": 2}, {"step": 3, "reward_mean": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    result = called(tmp_path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"     1   0.100  {'#' * 5}", f"     3   1.000  {'#' * 50}"]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    error = called(tmp_path).exception
    assert isinstance(error, UserError)
    assert "has no metrics.jsonl" in str(error)


def test_no_folder(tmp_path: Path) -> None:
    assert called(tmp_path / "missing").exit_code == 2

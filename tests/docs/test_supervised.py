"""Tests the run files of docs/supervised.md, changing only their length and the teacher's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from in_process import run_in_process
from pages import ROOT, Page
from rllm_workflows.sft_rows import open_rows

PAGE = Page(ROOT / "docs" / "supervised.md")
[ROWS] = [block.text for block in PAGE.blocks if block.language == "json"]
RUN_FILES = {block.file: block.text for block in PAGE.blocks if block.file and block.language == "toml"}


def rllm_core(folder: Path, *arguments: str) -> str:
    done = run_in_process(arguments, folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(ROWS, encoding="utf-8")
    for name, text in RUN_FILES.items():
        (tmp_path / str(name)).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_rows_are_rows(folder: Path) -> None:
    rows = open_rows(folder / "train.jsonl")
    assert [row.weight for row in rows] == [1.0, 0.5]


def test_what_is_in_the_table_is_what_a_row_may_have() -> None:
    assert set(PAGE.rows("Rows")) == {"messages", "tools", "weight", "input_ids", "assistant_masks"}


@pytest.mark.slow
def test_fine_tuning(folder: Path) -> None:
    said = rllm_core(folder, "train", "sft.toml", "--dry-run")
    assert "100 steps train 3,200 rows, 1.6e+03 epochs of 2" in said
    assert "predicted costs: 0 tokens, 0 calls" in said, "it never calls the model"
    rllm_core(folder, "train", "sft.toml", "--run-dir", "run", "-o", "training.steps=4")
    assert rllm_core(folder, "verify", "run").endswith("every rollout is accounted for\n")
    first, last = json.loads((folder / "run" / "summary.json").read_text())["validation"]
    assert last["nll_per_token"] < first["nll_per_token"]
    assert first["reward_mean"] is None
    assert (folder / "run" / "loss.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("own_tokens", [False, True])
def test_distillation(folder: Path, own_tokens: bool) -> None:
    from rllm_local.starter import starter_model

    settings = ["-o", "teacher.parser=chat_template"] if own_tokens else []
    settings += ["-o", f"teacher.model={json.dumps(str(starter_model()))}", "-o", "training.steps=2"]
    rllm_core(folder, "train", "distill.toml", "--run-dir", "run", *settings)
    assert rllm_core(folder, "verify", "run").endswith("every rollout is accounted for\n")
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(metrics[0]["teacher_kl_mean"]) < 1e-4, "it is its own teacher"
    assert {line["teacher_unscored_tokens"] for line in metrics} == {0}
    assert all("reward_mean" in line for line in metrics)

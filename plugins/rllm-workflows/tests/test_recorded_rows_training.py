"""A new model learns from the rollouts that a trained run has recorded, as ``rllm-core export`` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Path]


@pytest.fixture
def run(rllm_core: Callable[..., None]) -> Run:
    """``run(workflow, folder, **settings)``: trains; returns the folder."""

    def train(workflow: str, folder: Path, **settings: Any) -> Path:
        options = [part for key, value in settings.items() for part in ("-o", f"{key.replace('__', '.')}={value}")]
        rllm_core("train", workflow, "--backend", "local", "--run-dir", folder, *options)
        return folder

    return train


def validated(folder: Path) -> list[float]:
    return [one["solved"] for one in json.loads((folder / "summary.json").read_text())["validation"]]


@pytest.mark.slow
def test_both_workflows_read_an_exported_folder(rllm_core: Callable[..., None], run: Run, tmp_path: Path) -> None:
    few = {"training__steps": 2, "training__validation_rollouts": 2}
    recorded = run("sort", tmp_path / "run", training__groups_kept_per_step=16, training__rollouts_per_group=4, **few)
    rllm_core("export", recorded, tmp_path / "rows", "--to", "sft", "--best")
    rows = tmp_path / "rows" / "train.jsonl"
    short = {**few, "training__groups_per_step": 4}
    trained = run("sft", tmp_path / "sft", sft__train=rows, sft__method="recorded", **short)
    assert json.loads((trained / "summary.json").read_text())["books"]["trained"] == 8
    rows_of_dataset = {"dataset__train_file": rows, "dataset__id": "id", "training__rollouts_per_group": 2}
    run("dataset", tmp_path / "dataset", **short | rows_of_dataset)


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_rollouts_teach_a_new_model(
    rllm_core: Callable[..., None], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """With the settings of ``sort``, a run records one of its 16 groups per step."""
    recorded = run("sort", tmp_path / "run", training__seed=seed)
    rllm_core("export", recorded, tmp_path / "rows", "--to", "sft", "--best", "--solved")
    count = len((tmp_path / "rows" / "train.jsonl").read_text().splitlines())
    settings = {"sft__train": tmp_path / "rows" / "train.jsonl", "sft__method": "recorded", "training__seed": seed}
    learned = run("sft", tmp_path / "sft", training__steps=150, optimizer__learning_rate=1e-3, **settings)
    capsys.readouterr()
    rllm_core("eval", "sort", "--checkpoint", learned, "--json")
    [found] = json.loads(capsys.readouterr().out)["pass_at_k"]
    before, after = validated(recorded)
    print(f"seed {seed}: {count} rows; {before:.3f} -> {after:.3f}; from rows: {found['value']:.3f}")
    assert before < 0.1
    assert found["value"] > 0.8

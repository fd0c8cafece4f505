"""Follows ``docs/my-code.md``: its files, and its commands with fewer steps."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from in_process import run_in_process
from pages import ROOT, Page

import rllm_core
from rllm_core.run_folder.recorded import group_at, index_of

PAGE = Page(ROOT / "docs" / "my-code.md")
COMMANDS = [line for block in PAGE.blocks if block.language == "sh" for line in block.text.splitlines()]
TRAINING = [command for command in COMMANDS if command.startswith("rllm-core train")]
FILES = [block.text for block in PAGE.blocks if block.language == "python" and block.text.startswith("# ")]
CELL = next(block.text for block in PAGE.blocks if block.language == "python" and "rllm_core.train" in block.text)
SHORT = ("steps=2", "groups_per_step=2", "rollouts_per_group=2", "validation_rollouts=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for text in FILES:
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    words = ["".join(letters) for letters in itertools.permutations("abcdefg", 3)][:200]
    rows = [{"question": f"sort: {word}", "answer": "".join(sorted(word))} for word in words]
    assert len(rows) == 200
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["my-code", "train-on-my-data"])
def test_the_rows_of_the_pages_can_be_read(name: str, tmp_path: Path) -> None:
    [rows] = [block.text for block in Page(ROOT / "docs" / f"{name}.md").blocks if block.language == "json"]
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    command = ["train", "dataset", "--backend", "local", "-o", "dataset.train_file=rows.jsonl", "--dry-run"]
    done = run_in_process(command, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr


def test_the_run_file_of_the_page_trains_on_its_rows(tmp_path: Path) -> None:
    blocks = Page(ROOT / "docs" / "train-on-my-data.md").blocks
    for name, language in (("rows.jsonl", "json"), ("mine.toml", "toml")):
        [text] = [block.text for block in blocks if block.language == language]
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = run_in_process(["train", "mine.toml", "--dry-run"], folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_the_commands_of_the_page_train(folder: Path, command: str) -> None:
    options = [word for setting in SHORT for word in ("-o", f"training.{setting}")]
    arguments = [*shlex.split(command)[1:], *options]
    if "--run-dir" not in arguments:
        arguments += ["--run-dir", "runs/mine"]
    done = run_in_process(arguments, folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    kept = json.loads((folder / "runs/mine" / "files.json").read_text(encoding="utf-8"))
    named = {word for word in shlex.split(command.replace("=", " ")) if word.startswith("./")}
    assert {f"./{Path(path).name}" for path in kept} == named


@pytest.mark.slow
def test_parts_of_a_reward_are_averaged_and_recorded(folder: Path) -> None:
    test_the_commands_of_the_page_train(folder, TRAINING[0])
    metrics = json.loads((folder / "runs/mine" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert {"workflow/share", "workflow/is_right"} <= metrics.keys()
    group = group_at(folder / "runs/mine", index_of(folder / "runs/mine")[-1])
    for rollout in group.rollouts:
        assert set(rollout.episode.metadata["reward_parts"]) == {"share", "is_right", "expected"}


@pytest.mark.slow
def test_three_commands_lead_from_rows_to_a_trained_model_and_its_worst_group(folder: Path) -> None:
    assert len(FILES[0].strip().splitlines()) <= 6, "a reward of six lines, with its name"
    train, *look = (shlex.split(command)[1:] for command in COMMANDS[:3])
    half = [*train, "-o", "training.steps=100"]
    done = [run_in_process(words, folder=folder, environment=os.environ) for words in (half, *look)]
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    summary = json.loads((folder / "runs/mine/summary.json").read_text(encoding="utf-8"))
    assert summary["validation"][-1]["solved"] > summary["validation"][0]["solved"] + 0.8
    trained = [entry for entry in index_of(folder / "runs/mine") if entry.outcome != "validation"]
    lowest = min(entry.reward_mean for entry in trained)
    assert any(entry.task in done[1].stdout for entry in trained if entry.reward_mean == lowest)
    assert done[2].stdout.strip() == "abc"


@pytest.mark.slow
def test_the_environment_of_the_page_is_learned(folder: Path) -> None:
    [train] = [command for command in TRAINING if "echo." in command.replace("./echo.py", "")]
    done = run_in_process([*shlex.split(train)[1:], "--run-dir", "runs/mine"], folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    first, last = json.loads((folder / "runs/mine/summary.json").read_text(encoding="utf-8"))["validation"]
    assert last["reward_mean"] > first["reward_mean"] + 0.5


@pytest.mark.slow
def test_one_cell_does_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Compared after few steps; the test above shows that the command learns."""
    options = [word for setting in SHORT for word in ("-o", f"training.{setting}")]
    done = run_in_process([*shlex.split(COMMANDS[0])[1:], *options], folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr

    train = rllm_core.train
    few = {f"training.{name}": int(value) for name, _, value in (setting.partition("=") for setting in SHORT)}

    def train_few_steps(workflow: str, settings: dict[str, Any], **options: Any) -> rllm_core.Run:
        return train(workflow, {**settings, **few}, **options)

    monkeypatch.setattr(rllm_core, "train", train_few_steps)
    monkeypatch.chdir(folder)
    (folder / "cell.py").write_text(CELL, encoding="utf-8")
    names = runpy.run_path("cell.py")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(names["worst"].rollouts) > 1
    assert (names["run"].path / "metrics.jsonl").read_bytes() == (folder / "runs/mine/metrics.jsonl").read_bytes()

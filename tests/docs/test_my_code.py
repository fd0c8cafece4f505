"""Follows ``docs/my-code.md``: its files, and its commands with fewer steps."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path

import pytest
from in_process import run_in_process
from pages import ROOT, Page

from rllm_core.run_folder.recorded import group_at, index_of

PAGE = Page(ROOT / "docs" / "my-code.md")
COMMANDS = [block.text.strip() for block in PAGE.blocks if block.language == "sh"]
SHORT = ("steps=2", "groups_per_step=2", "rollouts_per_group=2", "validation_rollouts=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in PAGE.blocks:
        if block.language == "python":
            name = block.text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(block.text, encoding="utf-8")
    rows = [
        {"question": f"sort: {''.join(letters)}", "answer": "".join(sorted(letters))}
        for letters in itertools.permutations("abcd", 3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_train(folder: Path, command: str) -> None:
    options = [word for setting in SHORT for word in ("-o", f"training.{setting}")]
    arguments = [*shlex.split(command)[1:], *options, "--run-dir", "run"]
    done = run_in_process(arguments, folder=folder, environment=os.environ)
    assert done.returncode == 0, done.stderr
    kept = json.loads((folder / "run" / "files.json").read_text(encoding="utf-8"))
    named = {word for word in shlex.split(command.replace("=", " ")) if word.startswith("./")}
    assert {f"./{Path(path).name}" for path in kept} == named


@pytest.mark.slow
def test_parts_of_a_reward_are_averaged_and_recorded(folder: Path) -> None:
    test_the_commands_of_the_page_train(folder, COMMANDS[0])
    metrics = json.loads((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert {"workflow/share", "workflow/is_right"} <= metrics.keys()
    group = group_at(folder / "run", index_of(folder / "run")[-1])
    for rollout in group.rollouts:
        assert set(rollout.episode.metadata["reward_parts"]) == {"share", "is_right", "expected"}

"""Follows ``docs/using-the-model.md`` with short runs: every command but vLLM's, and the Python between them."""

from __future__ import annotations

import io
import os
import shlex
from pathlib import Path

import pytest
from in_process import run_in_process
from pages import ROOT, Page

PAGE = Page(ROOT / "docs" / "using-the-model.md")
SHORT = ("training.steps=1", "training.groups_per_step=2", "training.validation_rollouts=2")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses names that transformers left
def test_the_page_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("sort: dbca\n"))
    names: dict[str, object] = {}
    for block in PAGE.blocks:
        if block.language == "python":
            exec(compile(block.text, PAGE.name, "exec"), names)  # noqa: S102
        elif block.language == "sh":
            for line in block.text.splitlines():
                if not line.startswith("vllm serve "):
                    follow(line, tmp_path)
    answered = capsys.readouterr().out
    assert set(answered.strip()) <= set("abcdefgh")
    assert (tmp_path / "models" / "merged" / "config.json").exists()


def follow(command: str, folder: Path) -> None:
    arguments = shlex.split(command.replace("--step 250", "--step 1"))[1:]
    if arguments[0] == "train":
        arguments += [word for setting in SHORT for word in ("-o", setting)]
    if arguments[0] == "eval":
        arguments += ["--tasks", "2"]
    done = run_in_process(arguments, folder=folder, environment=os.environ)
    assert done.returncode == 0, f"{command}: {done.stderr}"

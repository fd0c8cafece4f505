"""Compares the output on ``docs/looking-at-runs.md`` with what the commands print for such runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path

from pages import ROOT, Page
from recorded_runs import add_tokens, called, group, rollout, step, write_run

from rllm_core.algorithms.grouping import FilterReason
from rllm_core.types import Task
from rllm_viewer.commands.runs import runs
from rllm_viewer.commands.show import show

PAGE = Page(ROOT / "docs" / "looking-at-runs.md")
GROUP, TOKENS, RUNS = (block.text for block in PAGE.blocks if block.language == "text")
CURVE = (0.05, 0.06, 0.2, 0.4, 0.6, 0.9, 0.98, 1.0)
NOISY_CURVE = (0.02, 0.03, 0.05, 0.08, 0.04, 0.09, 0.11)


def test_the_page_has_what_the_commands_print(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "sort: dbca"}]
    rollouts = [
        rollout(
            index,
            [step(asked, answer, weight_version=39)],
            reward,
            reward - 0.625,
            is_correct=reward == 1,
            metadata={"reward_parts": {"share": share, "expected": "abcd"}},
        )
        for index, (answer, reward, share) in enumerate([("abcd", 1.0, 1.0), ("abdc", 0.25, 0.5)])
    ]
    task = Task(task_id="word-17", data={"question": "sort: dbca", "answer": "abcd"})
    run = write_run(tmp_path / "run", [group(rollouts, step=40, task=task, weight_version=39)])
    add_tokens(run, {ord(letter): letter for letter in "abcd"})
    assert printed(show, run, "--group", 187) == GROUP
    assert printed(show, run, "--group", 187, "--tokens").endswith(TOKENS)


def test_the_page_has_what_runs_prints(tmp_path: Path) -> None:
    done, now = (tmp_path / f"sort-20260101-{clock}" for clock in ("120000", "140000"))
    rows = [{"step": 250 * (at + 1) // 8, "solved": solved} for at, solved in enumerate(CURVE)]
    write_run(done, metrics=rows, training={"steps": 250})
    validations = [{"step": 0, "solved": 0.035}, {"step": 250, "solved": 0.99}]
    summary = {"status": "completed", "optimizer_steps": 250, "validation": validations}
    (done / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    rows = [{"step": 40 * (at + 1) // 7, "solved": solved} for at, solved in enumerate(NOISY_CURVE)]
    write_run(now, metrics=rows, training={"steps": 250})
    for folder, age_seconds in ((done, 2.5 * 3_600), (now, 3.5 * 60)):
        for file in folder.iterdir():
            os.utime(file, 2 * (time.time() - age_seconds,))
    with (now / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert printed(runs, tmp_path) == RUNS


def test_reasons_exist() -> None:
    help_text = called(show, "--help").output
    named = re.findall(r"--reason (\w+)", PAGE.text) + re.findall(r"such as\s+(\w+)\s+or", help_text)
    assert len(named) == 2
    assert [name for name in named if name not in set(FilterReason)] == []


def printed(command: object, *arguments: object) -> str:
    result = called(command, *arguments)
    assert result.exit_code == 0, result.exception
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())

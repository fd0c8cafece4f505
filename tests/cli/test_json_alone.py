"""Tests that ``--json`` has stdout to itself, whatever a workflow prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from in_process import run_in_process

TALKATIVE = """
from rllm_core.types import Task
from rllm_core.workflow import Workflow

print("the file is imported")


class Talkative(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{word}", data={"word": word}) for word in ("abc", "bca", "cab")]

    async def run(self, task, completer):
        print("a rollout begins")
        step = await completer.complete([{"role": "user", "content": task.data["word"]}])
        return self.episode(task, [step], reward=float(len(step.text) > 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("eval", "--tasks", "1"), "pass_at_k"),
        (("train", "-o", "training.steps=1", "-o", "training.groups_per_step=1"), "optimizer_steps"),
    ],
)
def test_a_workflow_prints_beside_it(tmp_path: Path, command: tuple[str, ...], key: str) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE, encoding="utf-8")
    verb, *options = command
    arguments = [verb, "talkative.py", "--backend", "local", *options]
    alone = run_in_process([*arguments, "--json"], folder=tmp_path, environment=os.environ)
    assert alone.returncode == 0, alone.stderr
    assert key in json.loads(alone.stdout)
    assert "a rollout begins" in alone.stderr
    people = run_in_process(arguments, folder=tmp_path, environment=os.environ)
    assert "a rollout begins" in people.stdout

"""Tests that an evaluation takes its settings from the run whose checkpoint it gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from in_process import run_in_process

SMALL = ("steps=2", "groups_per_step=2", "rollouts_per_group=2", "validation_rollouts=4")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    options = [word for setting in SMALL for word in ("-o", f"training.{setting}")]
    arguments = ["train", "sort", "--backend", "local", "--run-dir", "run", *options]
    done = run_in_process(arguments, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["run", "run/checkpoints/step-000002"])
def test_the_run_file_is_that_of_the_run(trained: Path, checkpoint: str) -> None:
    done = run_in_process(["eval", "--checkpoint", checkpoint, "--json"], folder=trained, environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workflow"] == "sort"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "error: specify a workflow or a run file: rllm-core eval WORKFLOW|RUN.toml, or --checkpoint RUN"),
        (["eval", "--checkpoint", "elsewhere"], "error: elsewhere belongs to no run folder; specify its workflow"),
        (["eval", "--checkpoint", "nowhere"], "error: checkpoint nowhere does not exist; name a run folder"),
        (["eval", "sort", "--checkpoint", "nowhere"], "error: checkpoint nowhere does not exist; name a run folder"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = run_in_process(arguments, folder=tmp_path, environment=os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


SCORER = """
from rllm_core.algorithms.group_scorer import GroupScorer


class Judge(GroupScorer):
    async def score(self, group, services):
        raise OSError("the judge is down")
"""


@pytest.mark.slow
def test_an_evaluation_whose_rollouts_could_not_be_scored_fails(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SCORER)
    arguments = ["eval", "sort", "--backend", "local", "--tasks", "2", "-o", "algorithm.group_scorer=./judge.py"]
    done = run_in_process([*arguments, "--json"], folder=tmp_path, environment=os.environ)
    assert done.returncode == 1
    assert "judge.py' scored no rollout" in done.stderr
    result = json.loads(done.stdout)
    assert result["reward_mean"] is None
    assert [score["k"] for score in result["pass_at_k"]] == [1]


FAILING = """
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Failing(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{number}", data={"number": number}) for number in range(4)]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": "sort: dbca"}])
        if task.data["number"] == 2:
            raise ValueError("the tool is down")
        return self.episode(task, [step], reward=1.0, is_correct=task.data["number"] == 0)
"""


@pytest.mark.slow
def test_pass_at_k_says_how_many_tasks_it_is_the_mean_of(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    arguments = ["eval", "./failing.py", "--backend", "local", "-n", "2", "-k", "1"]
    done = run_in_process([*arguments, "--json"], folder=tmp_path, environment=os.environ)
    result = json.loads(done.stdout)
    [score] = result["pass_at_k"]
    assert (score["value"], score["tasks"], result["tasks"], result["failed"]) == (pytest.approx(1 / 3), 3, 4, 2)
    assert "over 3 of 4 tasks" in run_in_process(arguments, folder=tmp_path, environment=os.environ).stdout


@pytest.mark.parametrize(
    ("run_file", "missing"),
    [
        ('workflow = "gone"\nbackend = "local"\n', "no workflow named 'gone'"),
        ('workflow = "sort"\nbackend = "gone"\n', "no backend named 'gone'"),
    ],
)
@pytest.mark.parametrize("command", [["train", "--resume", "--run-dir"], ["eval", "--checkpoint"]])
def test_a_run_names_its_plugins_that_are_not_installed_any_more(
    tmp_path: Path, command: list[str], run_file: str, missing: str
) -> None:
    (tmp_path / "run.toml").write_text(run_file)
    (tmp_path / "plugins.json").write_text('[{"plugins": {"gone": "rllm-gone 1.0", "local": "rllm-local 0.0.1"}}]')
    done = run_in_process([*command, "."], folder=tmp_path, environment=os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing}; ")
    assert done.stderr.endswith("; the run's last launch also had rllm-gone 1.0, not installed here\n")

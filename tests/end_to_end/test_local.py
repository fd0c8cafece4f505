"""Tests the main use case with its real parts: starter model, torch, transformers, command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, Forks

from benchmarks import supervised
from rllm_core.run_folder import checkpoint

pytestmark = pytest.mark.slow

SMALL = ("training.steps=12", "training.groups_per_step=4", "training.rollouts_per_group=4",
         "training.validation_rollouts=16", "training.checkpoint_every_steps=3")  # fmt: skip


Train = Callable[..., Forked]


@pytest.fixture(scope="module")
def command(forking: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Forked]:
    """``command(*arguments)``: starts ``rllm-core``."""

    def start(*arguments: str) -> Forked:
        return forking.start(arguments, output=tmp_path_factory.mktemp("output"))

    return start


@pytest.fixture(scope="module")
def train(command: Callable[..., Forked]) -> Train:
    """``train(workflow, run_dir, *overrides)``: starts a run."""

    def start(workflow: str, run_dir: Path, *overrides: str, resume: bool = False) -> Forked:
        return command(*arguments(workflow, run_dir, *overrides, resume=resume))

    return start


def arguments(workflow: str, run_dir: Path, *overrides: str, resume: bool = False) -> list[str]:
    options = [argument for override in overrides for argument in ("-o", override)]
    return ["train", workflow, "--run-dir", str(run_dir), *options, *(["--resume"] if resume else [])]


def finish(process: Forked) -> str:
    assert process.wait() == 0, process.err
    return process.out


def finish_in_another_interpreter(*command: str) -> None:
    """Runs a command that shares no seed of string hashes with the forks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "rllm_core", *command], env=environment, check=True, timeout=1800)


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def mastered(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run with the shipped settings, and its output."""
    run_dir = tmp_path_factory.mktemp("mastered") / "run"
    return run_dir, finish(train("sort", run_dir))


def test_sort_is_learned_from_chance_to_mastery(command: Callable[..., Forked], mastered: tuple[Path, str]) -> None:
    run_dir, out = mastered
    assert out.splitlines()[-1] == f"run: {run_dir}"
    assert "first validation (step 0)" in out
    summary = summary_of(run_dir)
    first, last = summary["validation"][0], summary["validation"][-1]
    assert first["step"] == 0
    assert first["rollouts"] == last["rollouts"] == 512
    assert first["solved"] <= 0.1
    assert last["solved"] >= 0.95
    assert summary["status"] == "completed"
    books = summary["books"]
    assert books["dispatched"] == books["trained"] == summary["planned_steps"] * 256
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["rollout_logprob_difference_max"] for row in rows) < 1e-4
    assert all(row["segment_breaks"] == 0 for row in rows)

    measured = json.loads(
        finish(command("eval", "sort", "--checkpoint", str(run_dir), "--tasks", "100", "-n", "4", "--json"))
    )
    [pass_1, pass_4] = measured["pass_at_k"]
    assert pass_1["value"] >= 0.9
    assert pass_1["low"] <= pass_1["value"] <= pass_1["high"]
    assert pass_4["value"] >= pass_1["value"]
    trained_model = checkpoint.complete(run_dir / "checkpoints")[-1] / "backend"
    exported = json.loads(
        finish(command("eval", "sort", "--model", str(trained_model), "--tasks", "100", "-n", "4", "--json"))
    )
    assert exported["pass_at_k"] == measured["pass_at_k"], "a checkpoint is an ordinary model folder"


@pytest.mark.usefixtures("supervised_in_forks")
def test_students_learn_most_of_what_their_teacher_can(
    mastered: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the steps of `benchmarks.supervised.distil` on seed 0, whose teacher is the run of the test above."""
    monkeypatch.setattr(supervised, "DISTILL", supervised.DISTILL.replace("steps = 120", "steps = 60"))
    train_a_student = supervised.train

    def train(
        run_file: str | None, folder: Path, name: str, *overrides: str
    ) -> tuple[dict[str, Any], dict[str, float]]:
        if name != "teacher":
            return train_a_student(run_file, folder, name, *overrides)
        assert (run_file, overrides) == (None, ("training.seed=0", "local.starter_seed=0"))
        shutil.copytree(mastered[0], folder / name)
        return summary_of(folder / name), {}

    monkeypatch.setattr(supervised, "train", train)
    teacher, synchronous, asynchronous = supervised.distil(0, tmp_path)
    assert teacher["solved"] >= 0.9
    for student in (synchronous, asynchronous):
        assert student["solved_before"] <= 0.1
        assert student["solved"] >= 0.7, "in half of these steps, it is below 0.6"


def test_guess_is_learned_over_several_turns_each_one_segment(train: Train, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish(train("guess", run_dir))
    summary = summary_of(run_dir)
    assert summary["validation"][0]["solved"] <= 0.35
    assert summary["validation"][-1]["solved"] >= 0.9
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["turns_mean"] > 1
    assert sum(row["segment_breaks"] for row in rows) == 0
    assert all(row["samples"] == row["trajectories"] for row in rows), "a game is one training sample"


@pytest.fixture(scope="module")
def uninterrupted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(train("sort", run_dir, *SMALL))
    return run_dir


def test_same_seed_same_bytes(tmp_path: Path, uninterrupted: Path) -> None:
    finish_in_another_interpreter(*arguments("sort", tmp_path / "run", *SMALL))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


HELD = """
import asyncio, sys
from pathlib import Path
from rllm_core import cli
from rllm_workflows.sort import SortWorkflow

held_from = Path(sys.argv[sys.argv.index("--run-dir") + 1], "checkpoints", "step-000003")
run = SortWorkflow.run

async def held(self, task, completer):
    while held_from.exists():
        await asyncio.sleep(0.01)
    return await run(self, task, completer)

SortWorkflow.run = held
cli.main()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_resumed_equals_uninterrupted(
    forking: Forks, tmp_path: Path, uninterrupted: Path, how: signal.Signals
) -> None:
    """It is held after its first checkpoint, so that it has not ended before it is stopped."""
    run_dir = tmp_path / "run"
    (tmp_path / "held.py").write_text(HELD)
    process = forking.start(
        arguments("sort", run_dir, *SMALL), program=str(tmp_path / "held.py"), output=tmp_path / "output"
    )
    deadline = time.monotonic() + 600
    while not checkpoint.complete(run_dir / "checkpoints"):
        assert process.poll() is None, process.err
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait() == (-9 if how is signal.SIGKILL else 130)
    newest = int(checkpoint.complete(run_dir / "checkpoints")[-1].name[5:])
    assert newest < 12
    resume = arguments("sort", run_dir, *SMALL, resume=True)
    if how is signal.SIGKILL:
        finish_in_another_interpreter(*resume)
    else:
        finish(forking.start(resume, output=tmp_path / "output"))
    assert summary_of(run_dir)["resumed_from_step"] == newest
    assert (run_dir / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert summary_of(run_dir)["validation"] == summary_of(uninterrupted)["validation"]


WAITING_VALIDATION = """
import asyncio
from itertools import permutations
from pathlib import Path
from rllm_core.types import Task
from rllm_core.workflow import Workflow

FOLDER, CHECKPOINT = Path(__file__).parent, Path(__file__).parent / "run" / "checkpoints" / "step-000004"

class Words(Workflow):
    def tasks(self, split):
        words = ["".join(letters) for letters in permutations("abcd", 3)]
        return [Task(task_id=word, data={"split": split}) for word in words[split == "validation" :: 2]]

    async def run(self, task, completer):
        metrics = FOLDER / "run" / "metrics.jsonl"
        if task.data["split"] == "train":
            (FOLDER / "trains").touch()
        elif metrics.exists() and metrics.read_bytes().count(b"\\n") == 4:
            while not ((FOLDER / "trains") if (FOLDER / "resumed").exists() else CHECKPOINT).exists():
                await asyncio.sleep(0.01)
        step = await completer.complete([{"role": "user", "content": f"sort: {task.task_id}"}])
        return self.episode(task, [step], reward=sum(map(str.__eq__, step.text, sorted(task.task_id))))
"""


def test_a_validation_that_was_interrupted_does_not_stop_generation(train: Train, tmp_path: Path) -> None:
    """As in an uninterrupted run: otherwise other sequences share a batch, and numbers differ in rounding."""
    run_dir, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    settings = (*SMALL, "training.validate_every_steps=4", "training.validation_rollouts=8", "backend=local",
                "rollout.max_response_tokens=6")  # fmt: skip
    (tmp_path / "words.py").write_text(WAITING_VALIDATION)
    process = train(str(tmp_path / "words.py"), run_dir, *settings)
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    (tmp_path / "trains").unlink()
    (tmp_path / "resumed").touch()
    finish(train(str(tmp_path / "words.py"), run_dir, *settings, resume=True))
    assert summary_of(run_dir)["resumed_from_step"] == 4
    assert [line["step"] for line in summary_of(run_dir)["validation"]] == [0, 4, 8, 12]

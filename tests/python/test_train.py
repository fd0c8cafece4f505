"""Tests that training and evaluating from Python do what the command line does, with the starter model."""

from __future__ import annotations

import asyncio
import json
import linecache
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import run_in_process

import rllm_core
from rllm_core.errors import ConfigError, PluginError, RunError
from rllm_core.plugins.classes import MODULE
from rllm_core.run_file import tables_of_settings
from rllm_core.types import Task
from rllm_core.workflow import Workflow, WorkflowConfig

SMALL: dict[str, Any] = {
    "training": {"steps": 4, "groups_per_step": 2, "rollouts_per_group": 4, "validation_rollouts": 8},
    "training.checkpoint_every_steps": 2,
}
OPTIONS = [f"training.{key}={value}" for key, value in SMALL["training"].items()]
OPTIONS += ["training.checkpoint_every_steps=2"]
COMMAND_OPTIONS = [word for option in OPTIONS for word in ("-o", option)]
FILE = """
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Echo(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{word}", data={"word": word}) for word in ("abc", "bca")]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": task.data["word"]}])
        return self.episode(task, [step], reward=float(len(step.text) > 2))
"""


CELL = '''
class LettersConfig(WorkflowConfig):
    letters: int = 3


class Letters(Workflow):
    """Its reward is whether the model writes anything."""

    config_model = LettersConfig

    def tasks(self, split):
        return [Task(task_id=f"{split}-{word}", data={"word": word}) for word in ("abc", "bca")]

    async def run(self, task, completer):
        if self.config.letters < 0:
            raise ValueError("no letters")
        step = await completer.complete([{"role": "user", "content": task.data["word"][: self.config.letters]}])
        return self.episode(task, [step], reward=float(len(step.text) > 2))


trained = "not of the class"
'''


def of_cell(text: str) -> type[Workflow]:
    """Returns a class as a cell of a notebook defines it: in ``__main__``, with a source but without a file."""
    name = f"/nowhere/ipykernel/{abs(hash(text))}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__", "Task": Task, "Workflow": Workflow, "WorkflowConfig": WorkflowConfig}
    exec(compile(text, name, "exec"), namespace)  # noqa: S102 - as a notebook does
    found: type[Workflow] = namespace["Letters"]  # type: ignore[assignment]
    return found


@pytest.fixture
def workflow() -> type[Workflow]:
    return of_cell(CELL)


def commanded(arguments: Sequence[str], folder: Path, code: int = 0) -> str:
    done = run_in_process(arguments, folder=folder, environment=os.environ)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_the_metrics_are_those_of_the_command_also_in_a_running_loop(folder: Path) -> None:
    commanded(["train", "sort", "--backend", "local", "--run-dir", "command", *COMMAND_OPTIONS], folder)
    expected = (folder / "command" / "metrics.jsonl").read_bytes()
    assert expected.count(b"\n") == 4

    plain = rllm_core.train("sort", SMALL, backend="local", run_dir="plain")

    async def main() -> rllm_core.Run:
        loop = asyncio.get_running_loop()
        run = rllm_core.train("sort", SMALL, backend="local")
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)
        return run

    in_loop = asyncio.run(main())
    assert in_loop.path.parent == Path("runs"), "a new folder, named as those of the command"
    for run in (plain, in_loop):
        assert (run.path / "metrics.jsonl").read_bytes() == expected
        assert run.status == "completed"
    assert plain.config == rllm_core.Run("command").config

    measured = json.loads(commanded(["eval", "--checkpoint", "command", "-n", "2", "--json"], folder))
    assert rllm_core.evaluate(checkpoint=plain, n=2) == measured
    assert measured["rollouts_per_task"] == 2


@pytest.mark.slow
def test_a_class_of_a_program_is_trained_resumed_and_evaluated(folder: Path, workflow: type[Workflow]) -> None:
    settings = {**SMALL, "letters.letters": 2}
    run = rllm_core.train(workflow, settings, backend="local", run_dir="run")
    assert run.config["workflow"] == "python:Letters"
    assert run.config["letters"] == {"letters": 2}
    kept = json.loads((folder / "run" / "files.json").read_text(encoding="utf-8"))
    copy = (folder / "run" / kept["python:Letters"]["copy"]).read_text(encoding="utf-8")
    assert copy == CELL.partition("\n\n\ntrained")[0].lstrip() + "\n"

    with pytest.raises(ConfigError, match=r"already holds a run; .*\bresume=True"):
        rllm_core.train(workflow, settings, backend="local", run_dir="run")
    again = rllm_core.train(workflow, run_dir=run, resume=True)
    assert again.summary["resumed_from_step"] == 4
    assert rllm_core.evaluate(workflow, checkpoint=run)["workflow"] == "python:Letters"


@pytest.mark.slow
def test_the_command_line_says_that_it_cannot_resume_a_class(folder: Path, workflow: type[Workflow]) -> None:
    rllm_core.train(workflow, SMALL, backend="local", run_dir="run")
    del sys.modules[MODULE]  # as in another process
    for arguments in (["train", "--resume", "--run-dir", "run"], ["eval", "--checkpoint", "run"]):
        error = commanded(arguments, folder, code=2)
        assert "rllm_core.train(Letters, run_dir=..., resume=True)" in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_a_class_with_changed_source_is_refused_on_resume(folder: Path, workflow: type[Workflow]) -> None:
    rllm_core.train(workflow, {**SMALL, "training.steps": 1}, backend="local", run_dir="run")
    rest_changed, changed = CELL.replace("not of", "really not of"), CELL.replace("> 2", "> 3")
    rllm_core.train(of_cell(rest_changed), run_dir="run", resume=True)
    with pytest.raises(ConfigError, match="python:Letters has changed since the run in run was started"):
        rllm_core.train(of_cell(changed), run_dir="run", resume=True)


@pytest.mark.slow
def test_a_class_of_a_module_is_named_by_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_echo.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    import my_echo  # type: ignore[import-not-found]

    run = rllm_core.train(my_echo.Echo, {**SMALL, "training.steps": 1}, backend="local", run_dir="run")
    assert run.config["workflow"] == f"{folder / 'my_echo.py'}:Echo"
    commanded(["train", "--resume", "--run-dir", "run"], folder)
    with pytest.raises(ConfigError, match="lacks run, tasks"):
        rllm_core.train(Workflow)


@pytest.mark.slow
def test_an_installed_class_has_its_own_name(folder: Path) -> None:
    from rllm_workflows.sort import SortWorkflow

    run = rllm_core.train(SortWorkflow, {**SMALL, "training.steps": 1}, backend="local", run_dir="run")
    assert run.config["workflow"] == "sort"


@pytest.mark.slow
def test_an_edited_file_is_loaded_again(folder: Path) -> None:
    file = folder / "echo.py"
    file.write_text(FILE, encoding="utf-8")
    settings = {**SMALL, "training.steps": 1}
    rllm_core.train(file, settings, backend="local", run_dir="one")
    file.write_text(FILE.replace("float(len(step.text) > 2)", "7.0"), encoding="utf-8")
    run = rllm_core.train("echo.py", settings, backend="local", run_dir="two")
    assert [validation["reward_mean"] for validation in run.validations] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("target", "settings", "options"),
    [
        ("sort", {"training.stepz": 5}, ["-o", "training.stepz=5"]),
        ("sort", {"training": {"steps": "many"}}, ["-o", "training.steps=many"]),
        ("sort", {"sort": {"letterz": 5}}, ["-o", "sort.letterz=5"]),
        ("srot", {}, []),
        ("nowhere.toml", {}, []),
        (None, {}, []),
    ],
)
def test_errors_are_those_of_the_command(
    folder: Path, target: str | None, settings: dict[str, Any], options: list[str]
) -> None:
    arguments = ["train", *([target] if target else []), "--backend", "local", *options]
    with pytest.raises((ConfigError, PluginError)) as refused:
        rllm_core.train(target, settings, backend="local")
    assert commanded(arguments, folder, code=2) == f"error: {refused.value}\n"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("value", [np.int64(7), np.array(7)])
def test_numbers_of_numpy_are_those_of_python(value: Any) -> None:
    tables = tables_of_settings({"training.steps": value, "optimizer": {"betas": [np.float32(0.5), np.float64(0.75)]}})
    assert tables == {"training": {"steps": 7}, "optimizer": {"betas": [0.5, 0.75]}}
    assert type(tables["training"]["steps"]) is int


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rllm_core.train("dataset", {"dataset.reward": print}),
            r"dataset.reward is a function .* './score.py'",
        ),
        (lambda: rllm_core.train("sort", {"training.": 3}), "'training.' must have the form"),
        (lambda: rllm_core.train("sort", {3: 3}), "3 must have the form"),  # type: ignore[dict-item]
        (lambda: rllm_core.train("sort", ["a.b=3"]), "settings must be a dictionary such as"),  # type: ignore[arg-type]
        (lambda: rllm_core.train(3), "3 is not the name of a workflow"),  # type: ignore[arg-type]
        (lambda: rllm_core.train(int), "class int is not a complete workflow"),  # type: ignore[arg-type]
        (lambda: rllm_core.train(resume=True), "--resume needs --run-dir DIR .in Python, run_dir."),
        (lambda: rllm_core.evaluate("sort", n=0), "n = 0: must be an integer and at least 1"),
        (lambda: rllm_core.evaluate("sort", n="4"), "n = '4': must be an integer"),  # type: ignore[arg-type]
        (lambda: rllm_core.evaluate("sort", tasks=2.5), "tasks = 2.5: must be an integer"),  # type: ignore[arg-type]
        (lambda: rllm_core.evaluate("sort", k=8), "k = 8: must be a list of integers"),  # type: ignore[arg-type]
        (lambda: rllm_core.evaluate("sort", k="8"), "k = '8': must be a list of integers"),  # type: ignore[arg-type]
        (lambda: rllm_core.evaluate("sort", k=[2]), "pass@2 needs"),
        (lambda: rllm_core.evaluate("sort", split="test"), "split = 'test'"),  # type: ignore[arg-type]
        (lambda: rllm_core.evaluate(), "specify a workflow"),
    ],
)
def test_a_wrong_argument_is_one_line(folder: Path, call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "run").mkdir()
    (folder / "run" / "run.toml").touch()
    assert rllm_core.Run("~/run").path == folder / "run"
    with pytest.raises(ConfigError, match=f"run folder {folder}/none holds no run to resume"):
        rllm_core.train(run_dir="~/none", resume=True)
    with pytest.raises(ConfigError, match=f"checkpoint {folder}/none does not exist"):
        rllm_core.evaluate(checkpoint="~/none")
    assert "error: run folder " + str(folder) in commanded(["train", "--resume", "--run-dir=~/none"], folder, code=2)


@pytest.mark.slow
def test_a_failed_run_raises_and_keeps_its_folder(folder: Path, workflow: type[Workflow]) -> None:
    async def main() -> None:
        rllm_core.train(workflow, {**SMALL, "letters.letters": -1}, backend="local", run_dir="run")

    with pytest.raises(RunError, match="no letters"):
        asyncio.run(main())
    assert rllm_core.Run("run").status == "failed"
    assert "no letters" in rllm_core.Run("run").summary["error"]


@pytest.mark.slow
def test_in_another_thread_it_trains_without_signals(folder: Path) -> None:
    runs: list[rllm_core.Run] = []
    settings = {**SMALL, "training.steps": 1}
    thread = threading.Thread(
        target=lambda: runs.append(rllm_core.train("sort", settings, backend="local", run_dir="run"))
    )
    thread.start()
    thread.join()
    assert runs[0].status == "completed"

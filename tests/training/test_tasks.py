"""Tests valid results of a workflow's ``tasks()``, and the rejection of invalid ones before a run."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm_core.assembly import tasks as tasks_module
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.assembly.tasks import Tasks
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.hosts.inline import Inline
from rllm_core.plugins import PluginManager
from rllm_core.training import evaluation
from rllm_core.types import Task
from rllm_core.workflow import Split
from rllm_devkit.scripted import ScriptedWorkflow


def task(task_id: str) -> Task:
    return Task(task_id=task_id, data={"number": 0})


@pytest.fixture
def tasks_return(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Returns a function that replaces ``tasks`` of the scripted workflow; a callable is called with the split."""

    def replace(returns: Any) -> None:
        def tasks(workflow: ScriptedWorkflow, split: Split) -> Any:
            return returns(split) if callable(returns) else returns

        monkeypatch.setattr(ScriptedWorkflow, "tasks", tasks)

    return replace


def of_split(*ids: str) -> Callable[[str], list[Task]]:
    return lambda split: [task(f"{split}-{one}") for one in ids]


async def asynchronous(split: str) -> list[Task]:
    return [task(split)]


async def asynchronously_generated(split: str) -> Any:
    yield task(split)


def raising(split: str) -> list[Task]:
    return [task(split), task(str({}["answer"]))]  # type: ignore[index]


def raising_late(split: str) -> Any:
    yield task(split)
    raise ValueError("row 1 has no question")


def leaving(split: str) -> list[Task]:
    sys.exit("no data")


WRONG: list[tuple[Any, type[UserError], str]] = [
    (
        of_split("a", "b", "a"),
        ConfigError,
        "has two 'train' tasks with the id 'train-a': task 0 and task 2; every task",
    ),
    (
        [task("a"), task("b")],
        ConfigError,
        "has 2 ids, 'a' for instance, in both splits: task 0 of 'train' and task 0 of",
    ),
    (
        lambda split: [task("a"), task("same")] if split == "train" else [task("same")],
        ConfigError,
        "has the id 'same' in both splits: task 1 of 'train' and task 0 of 'validation'; hold tasks out",
    ),
    ([], ConfigError, "has no training tasks"),
    (None, PluginError, "tasks('train') returned nothing (None); return a list of rllm_core.types.Task"),
    (task("a"), PluginError, "tasks('train') returned one Task; return a list"),
    ("a", PluginError, "tasks('train') returned one str"),
    ({"a": task("a")}, PluginError, "tasks('train') returned one dict"),
    ({1, 2}, PluginError, "tasks('train') returned one set"),
    (7, PluginError, "tasks('train') returned one int"),
    ([task("a"), {"task_id": "b"}], PluginError, "tasks('train') has a dict as task 1; make it a Task("),
    (["a"], PluginError, "tasks('train') has a str as task 0"),
    (iter(["a"]), PluginError, "tasks('train') has a str as task 0"),
    (asynchronous, PluginError, "tasks('train') is async; make it a plain function"),
    (asynchronously_generated, PluginError, "tasks('train') is async; make it a plain function"),
    (raising, PluginError, "tasks('train') failed: tests/training/test_tasks.py:"),
    (raising, PluginError, ": KeyError: 'answer'"),
    (raising_late, PluginError, ": ValueError: row 1 has no question"),
    (leaving, PluginError, ": SystemExit: no data"),
    (
        lambda split: itertools.repeat(task("a")),
        ConfigError,
        "has two 'train' tasks with the id 'a': task 0 and task 1",
    ),
]


@pytest.mark.parametrize(("returns", "error", "message"), WRONG)
def test_what_is_no_list_of_tasks_is_refused_before_anything_is_made(
    plugins: PluginManager, tasks_return: Callable[[Any], None], returns: Any, error: type[UserError], message: str
) -> None:
    tasks_return(returns)
    config = load_run_config("say_yes", plugins, backend="scripted")
    with pytest.raises(error, match="workflow 'say_yes'.*" + re.escape(message)) as raised:
        assemble(config, plugins)
    assert "\n" not in str(raised.value)


def test_what_never_ends_is_refused(
    plugins: PluginManager, tasks_return: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "MAX_GENERATED_TASKS", 50)
    tasks_return(lambda split: (task(f"{split}-{number}") for number in itertools.count()))
    with pytest.raises(PluginError, match="yields more than 50 tasks, or never ends; end it, or return a sequence"):
        assemble(load_run_config("say_yes", plugins, backend="scripted"), plugins)


def test_an_evaluation_refuses_the_same(plugins: PluginManager, tasks_return: Callable[[Any], None]) -> None:
    tasks_return(of_split("a", "a"))
    resolved = resolve_run("say_yes", plugins, backend="scripted", engine="scripted")
    opening = evaluation.engine_by_name("scripted", resolved)
    play = evaluation.evaluate(
        resolved, Inline.of(ScriptedWorkflow()), opening, split="validation", task_limit=None, samples=1, ks=(1,)
    )
    with pytest.raises(ConfigError, match="two 'validation' tasks with the id 'validation-a': task 0 and task 1"):
        asyncio.run(play)


class Lazy(Sequence[Task]):
    """Sequence with too many tasks to hold in memory."""

    def __init__(self, split: str, count: int = 10**12) -> None:
        self.split, self.count, self.made = split, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.made += 1
        return task(f"{self.split}-{index}")


def test_a_huge_lazy_sequence_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "MAX_LAZY_TASKS_CHECKED", 100)
    lazy = {split: Lazy(split) for split in ("train", "validation")}

    class Huge(ScriptedWorkflow):
        def tasks(self, split: Split) -> Sequence[Task]:
            return lazy[split]

    tasks = Tasks(Huge(), "huge")
    tasks.check_apart()
    assert tasks.of("train") is lazy["train"]
    assert lazy["train"].made <= 200


class Walkable:
    """Has a length and indexing, but is not registered as a sequence."""

    def __init__(self, split: str) -> None:
        self.lazy = Lazy(split, 5)

    def __len__(self) -> int:
        return len(self.lazy)

    def __getitem__(self, index: int) -> Any:
        return self.lazy[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "returns",
    [
        lambda split: (task(f"{split}-{number}") for number in range(5)),
        lambda split: iter([task(f"{split}-{number}") for number in range(5)]),
        lambda split: tuple(task(f"{split}-{number}") for number in range(5)),
        lambda split: {f"{split}-{number}": task(f"{split}-{number}") for number in range(5)}.values(),
        lambda split: Lazy(split, 5),
        Walkable,
    ],
)
def test_what_can_be_walked_is_trained_and_validated(
    run_scripted: Callable[..., Any], tasks_return: Callable[[Any], None], returns: Any
) -> None:
    tasks_return(returns)
    run = run_scripted("training.steps=2")
    assert run.error is None
    trained = {event["task"] for event in run.lines("events") if event["event"] == "dispatch"}
    assert trained == {f"train-{number}" for number in range(5)}
    assert [validation["rollouts"] for validation in run.summary["validation"]] == [10, 10]


@pytest.mark.slow
def test_a_split_is_asked_for_once(run_scripted: Callable[..., Any], tasks_return: Callable[[Any], None]) -> None:
    asked: list[str] = []

    def generated(split: str) -> Any:
        asked.append(split)
        yield from of_split("a", "b")(split)

    tasks_return(generated)
    assert run_scripted("training.steps=1").error is None
    assert asked == ["train", "validation"]


@pytest.mark.slow
def test_without_validations_nobody_asks_for_their_tasks(
    run_scripted: Callable[..., Any], tasks_return: Callable[[Any], None]
) -> None:
    tasks_return(lambda split: [task("a"), task("b")] if split == "train" else None)
    assert run_scripted("training.steps=1", "training.validation_rollouts=0").error is None


PLAIN = """
from rllm_core.hookspecs import hookimpl
from rllm_core.providers import WorkflowProvider
from rllm_devkit.scripted import ScriptedWorkflow
from rllm_core.types import Task


CONFIG = "rllm_devkit.scripted:ScriptedWorkflowConfig"


class Twice(ScriptedWorkflow):
    name = "twice"

    def tasks(self, split):
        return [Task(task_id="a"), Task(task_id="a")]


@hookimpl
def workflows():
    return [WorkflowProvider(name="twice", load="twice:Twice", config=CONFIG, summary="Two tasks of one id.")]
"""


@pytest.mark.slow
def test_the_command_line_says_it_in_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(PLAIN)
    command = (
        "import sys, twice, rllm_devkit.scripted_plugin\n"
        "from rllm_core import cli\n"
        "from rllm_core.plugins import PluginManager\n"
        "plugins = PluginManager.from_environment(no_plugins=True)\n"
        "plugins.register(rllm_devkit.scripted_plugin, 'testing')\n"
        "plugins.register(twice, 'twice')\n"
        "cli.Session.plugins = plugins\n"
        "cli.main()\n"
    )
    arguments = ["train", "twice", "--backend", "scripted", "--run-dir", "run"]
    ended = subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: workflow 'twice' has two 'train' tasks with the id 'a': task 0 and task 1; ")
    assert not (tmp_path / "run").exists()

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

import numpy as np
import pytest

from rllm_core.assembly import tasks as tasks_module
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.assembly.tasks import Tasks, TaskStream, spread
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.hosts.inline import Inline
from rllm_core.plugins import PluginManager
from rllm_core.runs import evaluation
from rllm_core.seeds import derive_seed
from rllm_core.types import Task
from rllm_core.workflow import LazyTasks, Split
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


def numbered(split: str) -> Callable[[int], Task]:
    return lambda number: task(f"{split}-{number}")


def test_lazy_tasks_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def make(number: int) -> Task:
        made.append(number)
        return task(str(number))

    tasks = LazyTasks(make, 10)
    assert (len(tasks), made) == (10, [])
    assert [one.task_id for one in tasks[2:8:3]] == ["2", "5"]
    assert tasks[-1].task_id == "9"
    assert tasks[2] is tasks[2]
    assert made == [2, 5, 9]
    with pytest.raises(IndexError, match="task 10 of 10"):
        tasks[10]
    assert len(list(tasks)) == 10
    assert LazyTasks(make)[10**15].task_id == str(10**15)


@pytest.mark.parametrize("total", [None, 10**12, 10_000])
def test_a_stream_visits_every_task_once_and_needs_no_permutation_of_all(total: int | None) -> None:
    """In an order that the seed decides, and the same from any ordinal, as in a resumed run."""
    stream = TaskStream(LazyTasks(numbered("train"), total), seed=3)
    visited = [stream[ordinal].task_id for ordinal in range(9_000)]
    assert len(set(visited)) == 9_000
    assert visited[:4096] != sorted(visited[:4096], key=lambda one: int(one.partition("-")[2]))
    if total != 10_000:
        assert {*visited[:8192]} == {f"train-{number}" for number in range(8192)}
        moved = [(int(one.partition("-")[2]) - 4096) for one in visited[4096:8192]]
        assert moved != [int(one.partition("-")[2]) for one in visited[:4096]], "every block has its own order"
    assert stream.epoch(9_000) == 0
    again = TaskStream(LazyTasks(numbered("train"), total), seed=3)
    assert [again[ordinal].task_id for ordinal in (8_500, 5, 4_200)] == [visited[n] for n in (8_500, 5, 4_200)]
    other = TaskStream(LazyTasks(numbered("train"), total), seed=4)
    assert [other[ordinal].task_id for ordinal in range(50)] != visited[:50]


def test_a_stream_of_few_tasks_is_shuffled_as_ever() -> None:
    stream = TaskStream([task(str(number)) for number in range(7)], seed=1)
    expected = [np.random.default_rng(derive_seed(1, "epoch", epoch)).permutation(7) for epoch in range(2)]
    assert [int(stream[ordinal].task_id) for ordinal in range(14)] == [*expected[0], *expected[1]]


def test_a_validation_takes_the_first_of_endless_tasks() -> None:
    endless = LazyTasks(numbered("validation"))
    assert [(one.task_id, index) for one, index in spread(endless, 3)] == [(f"validation-{n}", 0) for n in range(3)]


def test_slow_tasks_are_checked_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "MAX_CHECK_SECONDS", -1.0)
    made: list[int] = []

    def make(number: int) -> Task:
        made.append(number)
        return task(f"{number}")

    class Slow(ScriptedWorkflow):
        def tasks(self, split: Split) -> Sequence[Task]:
            return LazyTasks(make)

    Tasks(Slow(), "slow").of("train")
    assert made == [0]

    class Listed(ScriptedWorkflow):
        def tasks(self, split: Split) -> Sequence[Task]:
            return [make(number) for number in range(50)] + [task("7")]

    with pytest.raises(ConfigError, match="task 7 and task 50"):
        Tasks(Listed(), "listed").of("train")


@pytest.mark.slow
def test_endless_tasks_are_trained_validated_and_resumed(
    run_scripted: Callable[..., Any], tasks_return: Callable[[Any], None], tmp_path: Path
) -> None:
    tasks_return(lambda split: LazyTasks(numbered(split)))
    straight = run_scripted("training.steps=4", path=tmp_path / "straight")
    assert straight.error is None
    first = run_scripted("training.steps=2", path=tmp_path / "run")
    resumed = run_scripted("training.steps=4", path=tmp_path / "run", resume=True)
    assert (first.error, resumed.error) == (None, None)

    def dispatched(run: Any) -> list[str]:
        return [event["task"] for event in run.lines("events") if event["event"] == "dispatch"]

    assert dispatched(resumed) == dispatched(straight)
    assert len(set(dispatched(straight))) == len(dispatched(straight))
    assert straight.summary["validation"][0]["rollouts"] == 10


def test_an_evaluation_of_endless_tasks_must_say_how_many(
    plugins: PluginManager, tasks_return: Callable[[Any], None]
) -> None:
    tasks_return(lambda split: LazyTasks(numbered(split)))
    resolved = resolve_run("say_yes", plugins, backend="scripted", engine="scripted")

    def play(task_limit: int | None) -> Any:
        opening = evaluation.engine_by_name("scripted", resolved)
        return asyncio.run(
            evaluation.evaluate(
                resolved,
                Inline.of(ScriptedWorkflow()),
                opening,
                split="train",
                task_limit=task_limit,
                samples=1,
                ks=(1,),
            )
        )

    with pytest.raises(ConfigError, match="endless train tasks; limit them with --tasks N"):
        play(None)
    assert play(3)["tasks"] == 3


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

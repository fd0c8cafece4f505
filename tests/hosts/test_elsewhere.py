"""Tests of workflows that only another environment can import."""

from __future__ import annotations

import json
import random
import shutil
import sys
import venv
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import rllm_core
from rllm_core.assembly.parts import parts_of, workflow_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.errors import ConfigError, PluginError
from rllm_core.hosts.elsewhere import _Lister
from rllm_core.plugins import PluginManager
from rllm_core.types import Task
from rllm_core.workflow import ENDLESS, Split
from rllm_viewer.verify import verify

DESCRIPTION = {
    **dict.fromkeys(("load", "summary", "package", "version", "reason"), ""),
    **dict.fromkeys(("samples", "blocks", "global_state", "waits_for_others"), False),
    "tables": {},
}
DESCRIBES = f"case $* in *describe) cat > /dev/null; echo '{json.dumps(DESCRIPTION)}' ;; *) false ;; esac"
WRITES, READS = f"{DESCRIBES} && exit; printf", "cat > /dev/null"
SMALL: dict[str, Any] = {
    "training": {"steps": 2, "groups_per_step": 2, "rollouts_per_group": 4, "validation_rollouts": 4},
    "training.checkpoint_every_steps": 1,
}
PLUGIN = """
from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider


@hookimpl
def workflows():
    return [WorkflowProvider(
        name="far", load="far_plugin.workflow:Far", config="far_plugin.workflow:FarConfig", summary="Far away.",
        run_file="far_plugin:run_file", variants="far_plugin:variants",
    )]


def run_file(given):
    seed = 8 if given.get("far", {}).get("environment") == "hills" else 7
    return {"model": {"path": "starter"}, "far": {"words": 600}, "training": {"seed": seed}}


def variants():
    return ["hills", "Lake/v1"]
"""
WORKFLOW = """
import time

import conflicting

from rllm_core.errors import ConfigError
from rllm_core.types import Episode, Task, Trajectory
from rllm_core.workflow import LazyTasks, Workflow, WorkflowConfig

assert conflicting.__version__ == "2.0.0"
ASKED = {"role": "user", "content": "go"}


class FarConfig(WorkflowConfig):
    environment: str = ""
    words: int = 4
    broken: bool = False


class Far(Workflow):
    name = "far"
    config_model = FarConfig

    def tasks(self, split):
        if self.config.broken:
            raise ConfigError("row 3 of the data has no word")
        if self.config.words == 0:
            return LazyTasks(lambda number: self.slow_task(split, number))
        return [Task(task_id=f"{split}-{n}", data={"n": n}) for n in range(self.config.words)]

    def slow_task(self, split, number):
        time.sleep(0.2)
        return Task(task_id=f"{split}-{number}", data={"n": number})

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": f"sort: {task.data['n']}"}])
        return Episode(
            task_id=task.task_id,
            trajectories=[Trajectory(steps=[step], reward=float(len(step.text)))],
            metadata={"version": conflicting.__version__},
        )

    def warm_start(self, rng):
        if self.config.environment != "hills":
            return None
        return ([ASKED, {"role": "assistant", "content": str(rng.random())}] for _ in range(100))

    def group_of(self, episode, trajectory):
        return "long" if trajectory.total_reward > 3 else "short"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of an environment with the plugin, and with another version of a library that this one has."""
    folder = tmp_path_factory.mktemp("second")
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    own = [
        path for path in sys.path if "site-packages" in path or "rllm" in path or (Path(path) / "rllm_core").is_dir()
    ]
    (site / "ours.pth").write_text("\n".join(own))
    (site / "conflicting").mkdir()
    (site / "conflicting" / "__init__.py").write_text('__version__ = "2.0.0"\n')
    package = site / "far_plugin"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "workflow.py").write_text(WORKFLOW)
    info = site / "far_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rllm_core]\nfar = far_plugin\n")
    (info / "RECORD").write_text("far_plugin/__init__.py,,\nfar_plugin/workflow.py,,\n")
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_a_workflow_of_another_environment_trains(python: str, tmp_path: Path) -> None:
    """From one line of the run file; this environment has neither the workflow nor what it imports."""
    with pytest.raises(PluginError, match="far"):
        resolve_run("far", PluginManager.from_environment())
    settings = SMALL | {"model.path": "", "rollout.python": python, "rollout.workers": 2}
    run = rllm_core.train("far", settings, run_dir=tmp_path / "run")
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["rollout_host"]["name"] == "processes"
    assert verify(run.path).problems == []
    groups = [json.loads(line) for line in (run.path / "groups.jsonl").read_text().splitlines()]
    assert "conflicting" not in sys.modules
    assert groups
    resumed = rllm_core.train(None, {"training.steps": 3}, run_dir=run.path, resume=True)
    assert json.loads((resumed.path / "summary.json").read_text())["optimizer_steps"] == 3


@pytest.mark.slow
def test_its_settings_are_checked_there(python: str) -> None:
    plugins = PluginManager.from_environment()
    resolved = resolve_run("far", plugins, settings={"rollout.python": python})
    assert resolved.config.training.seed == 7, "from its own run file"
    assert resolved.config.plugins["far"].words == 600
    with pytest.raises(ConfigError, match=r"far\.wrods"):
        resolve_run("far", plugins, settings={"rollout.python": python, "far.wrods": 3})


@pytest.mark.slow
def test_slow_and_endless_tasks_are_made_there_one_by_one(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: set[int] = set()
    fetch = _Lister.fetch

    def seen(lister: _Lister, split: Split, start: int, stop: int) -> list[Task]:
        tasks = fetch(lister, split, start, stop)
        fetched.update(range(start, start + len(tasks)))
        return tasks

    monkeypatch.setattr(_Lister, "fetch", seen)
    settings = SMALL | {"model.path": "", "rollout.python": python, "far.words": 0}
    tasks = parts_of(resolve_run("far", PluginManager.from_environment(), settings=settings)).tasks.of("train")
    assert len(tasks) == ENDLESS
    far = tasks[10**6]
    assert far.data["n"] == 10**6
    assert tasks[10**6] is far
    assert fetched >= {0, 10**6}
    assert 10**6 + 1 not in fetched, "the run waits for the one that it needs"


@pytest.mark.slow
def test_its_conversations_are_made_there(python: str) -> None:
    """Those of a state of the random numbers are the same as here, and two streams do not mix."""
    plugins = PluginManager.from_environment()
    settings = SMALL | {"model.path": "", "rollout.python": python}
    warm_start = parts_of(resolve_run("far/hills", plugins, settings=settings)).backend.warm_start
    assert warm_start is not None
    here, streams = random.Random(3), [warm_start(random.Random(seed)) for seed in (3, 4)]
    assert None not in streams
    mixed = zip(islice(streams[0] or (), 70), islice(streams[1] or (), 70), strict=True)
    first, second = zip(*mixed, strict=True)
    assert [chat[1]["content"] for chat in first] == [str(here.random()) for _ in range(70)]
    assert not {chat[1]["content"] for chat in first} & {chat[1]["content"] for chat in second}
    with pytest.raises(PluginError, match="ended after 100"):
        list(streams[0] or ())
    plain = parts_of(resolve_run("far", plugins, settings=settings)).backend.warm_start
    assert plain is not None
    assert plain(random.Random(3)) is None


@pytest.mark.parametrize("name", ["far/hills", "far-plugin/far/hills"])
def test_its_variants_are_known_there(python: str, name: str) -> None:
    resolved = resolve_run(name, PluginManager.from_environment(), settings={"rollout.python": python})
    own = name.removesuffix("/hills")
    assert resolved.config.workflow == own
    assert resolved.config.plugins[own].environment == "hills"
    assert resolved.config.training.seed == (8 if own == "far" else 7), "its own run file may depend on the variant"
    assert resolved.workflow.record.name == "far"


def test_an_unknown_variant_is_refused_there(python: str) -> None:
    with pytest.raises(ConfigError, match=r"no variant 'Hils'; did you mean hills\?"):
        resolve_run("far/Hils", PluginManager.from_environment(), settings={"rollout.python": python})


@pytest.mark.slow
def test_errors_of_its_data_are_one_line(python: str, tmp_path: Path) -> None:
    settings = SMALL | {"model.path": "", "rollout.python": python, "far.broken": True}
    with pytest.raises(ConfigError, match="row 3 of the data has no word"):
        rllm_core.train("far", settings, run_dir=tmp_path / "run")


def test_an_interpreter_without_it_says_so(tmp_path: Path) -> None:
    plugins = PluginManager.from_environment()
    with pytest.raises(PluginError, match=r"no workflow named 'far'.*rollout\.python"):
        resolve_run("far", plugins, settings={"rollout.python": sys.executable})
    with pytest.raises(ConfigError, match="cannot be started"):
        resolve_run("far", plugins, settings={"rollout.python": str(tmp_path / "nothing")})
    for program, said in (("true", "did not describe the workflow"), ("false", "ended with exit code 1")):
        with pytest.raises(PluginError, match=f"{said}; it must be the Python interpreter"):
            resolve_run("far", plugins, settings={"rollout.python": shutil.which(program)})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo '{}'", "described the workflow without load, summary"),
        (f"{WRITES} 'hello, world'; {READS}", "broke the worker protocol .*it wrote b'hello, world.*standard error"),
        (f"{WRITES} '\\0\\0\\0\\1\\5'; {READS}", "broke the worker protocol .*Expected `array`"),
        (
            f"{WRITES} '\\0\\0\\0\\16\\221\\201\\244type\\246closed'; {READS}",
            "it sent Closed instead of Ready",
        ),
    ],
)
def test_a_program_that_breaks_the_protocol_is_named(tmp_path: Path, body: str, said: str) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(PluginError, match=said):
        workflow_of(
            resolve_run("far", PluginManager.from_environment(), settings={"rollout.python": str(program)})
        ).tasks("train")

"""Tests that files of the user stand in place of plugins: workflows, rewards, estimators, losses and corrections."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core.assembly.resolution import resolve_run
from rllm_core.errors import ConfigError, PluginError, RunError, UserError
from rllm_core.file_references import is_file_reference, section_name, with_absolute_files
from rllm_core.plugins import PluginManager
from rllm_core.services import Services
from rllm_core.types import Task

RunScripted = Callable[..., Any]

WORKFLOW = """
from rllm_core.types import Task
from rllm_core.workflow import Workflow, WorkflowConfig


class Config(WorkflowConfig):
    letters: int = 2


class Echo(Workflow):
    config_model = Config
    config: Config

    def tasks(self, split):
        return [Task(task_id=f"{split}-{number}", data={"number": number}) for number in range(8)]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": "a" * self.config.letters}])
        return self.episode(task, [step], reward=float(len(step.text) % 2 == 0))


def run_file():
    return {"training": {"steps": 3}, "env": {"letters": 3}}
"""
REWARDED = (
    WORKFLOW.replace("float(len(step.text) % 2 == 0)", "await self.reward(task, step.text)")
    .replace(
        "    async def run",
        """    @property
    def reward(self):
        return self.services.reward_function(self.config.reward)

    async def run""",
    )
    .replace("    letters: int = 2\n", '    letters: int = 2\n    reward: str = ""\n')
)
ESTIMATOR = """
import numpy as np

from rllm_core.algorithms.advantages import AdvantageEstimator, rewards


class Signs(AdvantageEstimator):
    def __call__(self, groups):
        return [
            [np.full(len(t.steps), 1.0 if reward > 0 else -1.0) for reward, t in zip(rewards(g), g.trajectories)]
            for g in groups
        ]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("name", "expected"),
    [("./a.py", True), ("../a.py:B", True), ("/x/a.py:B", True), ("~/a.py", True), ("a.py", False), ("sort", False),
     ("./a.toml", False), ("package/name", False), ("./a.py:1x", False)],
)  # fmt: skip
def test_a_reference_begins_like_a_path_and_names_python(name: str, expected: bool) -> None:
    assert is_file_reference(name) is expected


def test_sections_are_called_as_the_file() -> None:
    assert section_name("/x/My Env.py:Echo") == "my-env"
    assert section_name("/x/_env.py") == "file_env"
    assert section_name("sort") == "sort"


def test_references_become_absolute_wherever_they_stand() -> None:
    tables = {"workflow": "./env.py:E", "algorithm": {"corrections": ["../c.py", "token_tis"]}, "steps": 3}
    assert with_absolute_files(tables, Path("/runs/one")) == {
        "workflow": "/runs/one/env.py:E",
        "algorithm": {"corrections": ["/runs/c.py", "token_tis"]},
        "steps": 3,
    }


@pytest.mark.slow
def test_a_workflow_in_a_file_is_trained_with_its_section_and_its_run_file(
    run_scripted: RunScripted, write: Callable[[str, str], Path]
) -> None:
    path = write("env.py", WORKFLOW)
    run = run_scripted("env.letters=5", target=str(path))
    assert run.error is None
    assert run.summary["planned_steps"] == 6, "-o wins over run_file()"
    assert run.assembly.workflow.config.letters == 5
    assert run.assembly.config.plugins["env"].letters == 5
    content = path.read_bytes()
    kept = json.loads((run.path / "files.json").read_text())
    assert kept == {str(path): {"sha256": hashlib.sha256(content).hexdigest(), "copy": "files/env.py"}}
    assert (run.path / "files" / "env.py").read_bytes() == content


def test_a_run_file_names_files_relative_to_itself(
    plugins: PluginManager, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("env.py", WORKFLOW)
    write("signs.py", ESTIMATOR)
    path = write("run.toml", 'workflow = "./env.py:Echo"\n[algorithm]\nname = "./signs.py"\n')
    monkeypatch.chdir(tmp_path)
    resolved = resolve_run(str(path), plugins, backend="scripted")
    assert resolved.config.workflow == f"{path.parent}/env.py:Echo"
    assert resolved.config.training.steps == 3, "the file's own run_file()"
    assert [provided.record.load for provided in resolved.estimators.values()] == [f"{path.parent}/signs.py:Signs"]
    assert plugins.sources == [f"{path.parent}/env.py", f"{path.parent}/signs.py"]


def test_only_files_that_are_named_are_loaded(plugins: PluginManager, write: Callable[[str, str], Path]) -> None:
    write("other.py", "raise AssertionError('loaded')")
    path = write("env.py", "import sys\nassert sys.path == " + repr(sys.path) + "\n" + WORKFLOW)
    resolve_run(str(path), plugins, backend="scripted")
    assert plugins.sources == [str(path)]


@pytest.mark.slow
def test_a_changed_file_is_refused_on_resume(run_scripted: RunScripted, write: Callable[[str, str], Path]) -> None:
    path = write("env.py", WORKFLOW)
    run = run_scripted(target=str(path))
    path.write_text(WORKFLOW + "\n# changed\n", encoding="utf-8")
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    refused = run_scripted(target=str(path), path=run.path, resume=True, is_begun=False).error
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith(f"{path} has changed since the run in {run.path} was started; restore it from")
    assert {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()} == before
    path.write_text(WORKFLOW, encoding="utf-8")
    assert run_scripted(target=str(path), path=run.path, resume=True).error is None


@pytest.mark.slow
@pytest.mark.parametrize("named", ["{}:solve", "agent.py"])
def test_files_that_only_a_setting_names_are_kept_and_compared(
    run_scripted: RunScripted, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    text = WORKFLOW.replace("letters: int = 2", "letters: int = 2\n    agents: tuple[str, ...] = ()")
    path, agent = write("env.py", text), write("agent.py", "def solve():\n    pass\n")
    monkeypatch.chdir(agent.parent)
    elsewhere = agent.with_name("in_a_container.py")
    agents = f'env.agents=["{named.format(agent)}", "{elsewhere}", "in_a_container.py"]'
    run = run_scripted(agents, target=str(path))
    assert run.error is None
    assert set(json.loads((run.path / "files.json").read_text())) == {str(path), str(agent)}
    for change in (lambda: agent.write_text("def solve():\n    return 1\n", encoding="utf-8"), agent.unlink):
        change()
        refused = run_scripted(agents, target=str(path), path=run.path, resume=True, is_begun=False).error
        assert isinstance(refused, ConfigError)
        assert str(refused).startswith(f"{agent} has changed since the run in {run.path} was started")


def scored(reference: str) -> Any:
    """Scores an answer with the reward function of a file."""

    async def score() -> Any:
        services = Services(PluginManager())
        try:
            return await services.reward_function(reference)(Task(task_id="t"), "hello")
        finally:
            await services.close()

    return asyncio.run(score())


@pytest.mark.parametrize(
    ("result", "metrics", "parts"),
    [
        ("0.5", {}, set()),
        ("True", {}, set()),
        ('1, {"length": 3, "right": True, "said": text[:1]}', {"length": 3.0, "right": 1.0}, {"said"}),
    ],
)
@pytest.mark.parametrize("form", ["def", "async def"])
def test_a_reward_in_a_file_returns_a_number_and_parts(
    write: Callable[[str, str], Path], result: str, metrics: dict[str, float], parts: set[str], form: str
) -> None:
    path = write("score.py", f"{form} score(task, text):\n    return {result}\n")
    score = scored(f"{path}:score")
    assert score == {"0.5": 0.5}.get(result, 1.0)
    assert score.numbers == metrics
    assert score.parts.keys() - metrics.keys() == parts


def returning(tables: object) -> str:
    """The workflow with another result of ``run_file``."""
    return WORKFLOW.replace('{"training": {"steps": 3}, "env": {"letters": 3}}', repr(tables))


NO_MODEL = WORKFLOW.replace("config_model = Config", "config_model = dict")
LAMBDA = "score = lambda task, text: 2.0\n"
DECORATED = """
def double(function):
    def doubled(task, text):
        return 2 * function(task, text)
    return doubled

@double
def score(task, text):
    return 1.0
"""


@pytest.mark.parametrize(("text", "name"), [(LAMBDA, ""), (DECORATED, ":score")])
def test_a_reward_is_found_by_its_name_in_the_file(write: Callable[[str, str], Path], text: str, name: str) -> None:
    """Python calls these functions ``<lambda>`` and ``double.<locals>.doubled``."""
    path = write("score.py", text)
    assert scored(f"{path}{name}") == 2.0


@pytest.mark.parametrize("parameters", ["text", "task", "prompts, completions, answer", "*, task, text", "**kwargs"])
def test_a_reward_with_other_parameters_is_not_called(write: Callable[[str, str], Path], parameters: str) -> None:
    path = write("score.py", f"def score({parameters}):\n    return 1.0\n")
    with pytest.raises(PluginError, match=r"score\.py:score must be .* two arguments, \(task, text\)"):
        Services(PluginManager()).reward_function(str(path))


@pytest.mark.slow
def test_a_reward_in_a_file_runs_in_a_child_process(
    run_scripted: RunScripted, write: Callable[[str, str], Path]
) -> None:
    path = write("env.py", REWARDED)
    pid = "import os\n\ndef score(task, text):\n    return float(os.getpid() != int(open(%r).read()))\n"
    parent = write("pid.txt", str(os.getpid()))
    score = write("score.py", pid % str(parent))
    run = run_scripted(f"env.reward={score}", "algorithm.filter_uniform_groups=false", target=str(path))
    assert run.error is None
    assert {json.loads(line)["reward_mean"] for line in (run.path / "metrics.jsonl").read_text().splitlines()} == {1.0}
    assert set(json.loads((run.path / "files.json").read_text())) == {str(path), str(score)}


@pytest.mark.slow
@pytest.mark.parametrize("host", ["inline", "processes"])
def test_text_that_a_reward_rejects_is_counted(
    run_scripted: RunScripted, write: Callable[[str, str], Path], host: str
) -> None:
    """In the process of the run and in workers: the function raises for every text but that of one task."""
    blaming = (
        REWARDED.replace("(self.config.reward)", "(self.config.reward, blame_text=(ChildRaised,))")
        .replace("reward=await self.reward(task, step.text)", "reward=score, metrics=score.numbers")
        .replace(
            "        return self.episode",
            "        score = await self.reward(task, step.text)\n        return self.episode",
        )
    )
    path = write("env.py", f"from rllm_core.sandbox import ChildRaised\n{blaming}")
    score = write("score.py", "def score(task, text):\n    return [1.0][task.data['number'] % 2]\n")
    run = run_scripted(
        f"env.reward={score}", "algorithm.filter_uniform_groups=false", f"rollout.host={host}", target=str(path)
    )
    assert run.error is None
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert any(line["workflow/rejected"] > 0 for line in lines)
    assert all(line["workflow/rejected"] == pytest.approx(1 - line["reward_mean"]) for line in lines)


@pytest.mark.slow
def test_an_estimator_in_a_file_is_trained(run_scripted: RunScripted, write: Callable[[str, str], Path]) -> None:
    path = write("signs.py", ESTIMATOR)
    run = run_scripted(f"algorithm.name={path}")
    assert run.error is None
    assert run.assembly.config.algorithm.name == str(path)


def test_a_run_file_in_a_file_may_have_dotted_keys(plugins: PluginManager, write: Callable[[str, str], Path]) -> None:
    """As `rllm_core.train` takes them; they were ignored."""
    path = write("env.py", returning({"training.steps": 7, "env.letters": 4}))
    assert resolve_run(str(path), plugins, backend="scripted").config.training.steps == 7


@pytest.mark.parametrize("host", ["inline", "processes"])
def test_an_open_without_async_is_explained(
    run_scripted: RunScripted, write: Callable[[str, str], Path], host: str
) -> None:
    path = write(
        "env.py", WORKFLOW.replace("    async def run", "    def open(self):\n        pass\n\n    async def run")
    )
    run = run_scripted(f"rollout.host={host}", is_begun=False, target=str(path))
    assert isinstance(run.error, UserError)
    assert "env.py:17) must be a coroutine function; write async def open" in str(run.error)


def test_an_open_that_exits_is_told_without_the_names_of_the_core(
    run_scripted: RunScripted, write: Callable[[str, str], Path]
) -> None:
    exits = "    async def open(self):\n        raise SystemExit('no server')\n\n    async def run"
    path = write("env.py", WORKFLOW.replace("    async def run", exits))
    run = run_scripted("rollout.host=inline", is_begun=False, target=str(path))
    assert run.summary["error"].endswith("env.py:18: SystemExit: no server")


def test_a_workflow_that_returns_no_steps_learns_why_nothing_is_trained(
    run_scripted: RunScripted, write: Callable[[str, str], Path]
) -> None:
    path = write("env.py", WORKFLOW.replace("[step], reward", "[], reward"))
    run = run_scripted("algorithm.max_group_attempts=2", "training.validation_rollouts=0", target=str(path))
    assert isinstance(run.error, RunError)
    assert "because their episodes have no sampled steps" in str(run.error)
    assert "return the steps of completer.complete()" in str(run.error)
    assert "harder tasks" not in str(run.error)


@pytest.mark.parametrize(
    ("name", "text", "reference", "message"),
    [
        ("env.py", "", "env.py", "the file has no subclasses of rllm_core.workflow.Workflow; write one, or"),
        ("env.py", WORKFLOW.replace("run(", "play("), "env.py", r"env\.py': class Echo must also define run"),
        ("env.py", WORKFLOW.replace("def ", "def _"), "env.py:Echo", "class Echo must also define run, tasks"),
        ("env.py", WORKFLOW + "\n\nclass Other(Echo):\n    pass\n", "env.py", "Echo, Other; name one, such as"),
        ("env.py", WORKFLOW, "env.py:Config", r"Config is not one of the file's subclasses .* \(Echo\)"),
        ("env.py", "import nothing_of_this_name", "env.py", "cannot be loaded: .*nothing_of_this_name"),
        ("env.py", "raise SystemExit(3)", "env.py", "cannot be loaded: .*SystemExit"),
        ("env.py", "def broken(:", "env.py", "cannot be loaded: .*SyntaxError"),
        ("env.txt", "", "env.py", "there is no file"),
        ("env.py", returning(None), "env.py", r"env\.py:run_file of workflow 'env': .* got NoneType"),
        ("env.py", NO_MODEL, "env.py", r"workflow 'env' \(/.*env\.py\): config="),
    ],
)
def test_a_wrong_file_is_one_line(
    plugins: PluginManager, write: Callable[[str, str], Path], name: str, text: str, reference: str, message: str
) -> None:
    folder = write(name, text).parent
    with pytest.raises((PluginError, ConfigError), match=message) as error:
        resolve_run(f"{folder}/{reference}", plugins, backend="scripted")
    assert "\n" not in str(error.value)
    assert f"{folder}/{reference}" in str(error.value)


def test_other_kinds_need_a_package(plugins: PluginManager, write: Callable[[str, str], Path]) -> None:
    path = write("env.py", WORKFLOW)
    with pytest.raises(PluginError, match="a backend needs a package; create one with: rllm-core new backend NAME"):
        resolve_run(str(path), plugins, backend=str(path))

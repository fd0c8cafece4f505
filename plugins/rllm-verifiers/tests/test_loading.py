"""What cannot be played is one line, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
from players import TASKSETS, workflow
from rllm_verifiers.config import VerifiersConfig
from rllm_verifiers.workflow import VerifiersWorkflow

from rllm_core.errors import ConfigError

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Own"{more}]

class Data(vf.TaskData):
    {field}

class OwnTask(vf.Task[Data]):
    {task}

class Own(vf.Taskset[OwnTask]):
    {taskset}
    def load(self):
        {load}
{rest}
"""


def taskset(folder: Path, name: str = "own_taskset", **parts: str) -> VerifiersWorkflow:
    """Returns the workflow with a taskset of these parts."""
    defaults = {
        "more": "",
        "field": "pass",
        "task": "pass",
        "taskset": "pass",
        "load": "return [OwnTask(Data(prompt=f'question {n}')) for n in range(10)]",
        "rest": "",
    }
    (folder / f"{name}.py").write_text(TASKSET.format(**defaults | parts))
    return VerifiersWorkflow(VerifiersConfig(environment=str(folder / f"{name}.py")))


@pytest.mark.parametrize(
    ("name", "parts", "said"),
    [
        ("own_container", {"task": "NEEDS_CONTAINER = True"}, "needs a container"),
        ("own_image", {"load": "return [OwnTask(Data(prompt='x', image='python:3.11'))]"}, "python:3.11"),
        ("own_lib", {"rest": "import no_such_library"}, "no_such_library.*install it"),
        ("own_data", {"load": "raise OSError('the hub is not to be reached')"}, "OSError: the hub.*network"),
        ("own_none", {"load": "return []"}, "no tasks"),
        (
            "own_json",
            {
                "load": "return [OwnTask(Data(prompt='x', made=3))]",
                "field": "made: int = __import__('pydantic').Field(0, exclude=True)",
            },
            "JSON",
        ),
        (
            "own_shell",
            {
                "more": ", 'OwnEnv'",
                "rest": "class OwnConfig(vf.EnvConfig):\n"
                "    solver: vf.AgentConfig = vf.AgentConfig(harness={'id': 'bash'})\n\n"
                "class OwnEnv(vf.Env[OwnConfig]):\n"
                "    async def run(self, task, agents):\n        await agents.solver.run(task)\n",
            },
            "agent 'solver' is played by the program 'bash'",
        ),
        (
            "own_model",
            {
                "more": ", 'OwnEnv'",
                "rest": "class OwnConfig(vf.EnvConfig):\n"
                "    judge: vf.AgentConfig = vf.AgentConfig(model='gpt-9')\n\n"
                "class OwnEnv(vf.Env[OwnConfig]):\n"
                "    async def run(self, task, agents):\n        await agents.judge.run(task)\n",
            },
            "needs model 'gpt-9'",
        ),
    ],
)
def test_what_cannot_be_played_says_why(
    name: str, parts: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match=said) as refused:
        taskset(tmp_path, name, **parts).tasks("train")
    assert "\n" not in str(refused.value)


def test_a_judge_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    judged = {"task": {"judges": [{"id": "reference"}]}}
    with pytest.raises(ConfigError, match=r"judges\[0\].*needs a key: set PRIME_API_KEY"):
        workflow("last_letter", arguments=judged).tasks("train")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("no-such-package", "no-such-package.*install it"),
        ("primeintellect/no-such-package", "install it"),
        ("./no_such_file.py", "no taskset at"),
    ],
)
def test_what_is_not_there_says_so(environment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VerifiersWorkflow(VerifiersConfig(environment=environment)).tasks("train")
    with pytest.raises(ConfigError, match="install it"):
        workflow("last_letter", env_arguments={"id": "no-such-env"}).tasks("train")


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(ConfigError, match="lenght"):
        workflow("last_letter", arguments={"lenght": 3}).tasks("train")


def test_a_file_must_not_have_the_name_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match="by the name 'json': rename it"):
        taskset(tmp_path, "json").tasks("train")
    with pytest.raises(ConfigError, match="lower-case"):
        taskset(tmp_path, "Own-Words").tasks("train")


def test_a_folder_in_the_layout_of_verifiers_is_a_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    folder = tmp_path / "own_letters"
    (folder / "own_letters").mkdir(parents=True)
    text = (TASKSETS / "last_letter.py").read_text()
    (folder / "own_letters" / "__init__.py").write_text(text)
    found = VerifiersWorkflow(VerifiersConfig(environment=str(folder), arguments={"length": 5}))
    assert len(found.tasks("train")[0].data["row"]["prompt"].split()) == 6


def test_the_harness_of_verifiers_and_its_cloud_are_never_used() -> None:
    for name, pairing in (("last_letter", ""), ("higher", ""), ("last_letter", "user-sim")):
        environment = workflow(name, env_arguments={"id": pairing})._environment
        assert {harness.config.id for harness in environment._harnesses.values()} == {"rllm_verifiers"}
        assert {spec.runtime.type for spec in environment._agent_specs.values()} == {"subprocess"}

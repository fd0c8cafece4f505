"""Tests that hostile input stays harmless: no unpickling, no evaluation, no paths from names, no written secrets."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import Task
from rllm_devkit import scripted

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in (ROOT / "rllm_core", ROOT / "benchmarks", *(ROOT / "plugins").iterdir())
    for path in folder.rglob("*.py")
    if "tests" not in path.relative_to(ROOT).parts
)
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.serialization.load", "parse_expr", "sympify", "read_pickle"}


def offences(source: str) -> Iterator[str]:
    """Yields code in a module that could execute data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in FORBIDDEN_MODULES:
                    yield f"line {node.lineno}: imports {name}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_CALLS - {"eval"}:
                yield f"line {node.lineno}: calls {called}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno}: {called} allows pickle"
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno}: {called} starts a shell"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_or_evaluates(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "eval('1 + 1')",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "sympy.parse_expr(text)",
    ],
)
def test_the_check_finds_what_it_is_for(source: str) -> None:
    assert len(list(offences(source))) == 1


HOSTILE = ("../../escaped", "/absolute", "nul\0byte", "CON", "x" * 300, "a/b", "..", "new\nline", "~", "$(id)")


def train(run_dir: Path, *overrides: str) -> BaseException | None:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    small = ("training.steps=4", "training.groups_per_step=2", "training.rollouts_per_group=2",
             "training.validation_rollouts=4", "training.checkpoint_every_steps=1")  # fmt: skip
    config = load_run_config("say_yes", plugins, overrides=(*small, *overrides), backend="scripted")
    try:
        asyncio.run(launch.train(assemble(config, plugins), run_dir, resume=False, progress=Progress()))
    except Exception as error:
        return error
    return None


@pytest.mark.slow
def test_names_from_data_never_become_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(self: Any, split: str) -> Sequence[Task]:
        return [Task(task_id=name if split == "train" else f"{name}{split}") for name in HOSTILE]

    monkeypatch.setattr(scripted.ScriptedWorkflow, "tasks", tasks)
    run_dir = tmp_path / "runs" / "run"
    spilled = ("training.staleness_threshold=3", "training.buffer_max_bytes=1", "training.buffer_spill=true")
    assert train(run_dir, *spilled) is None
    outside = [path for path in tmp_path.rglob("*") if path != run_dir.parent and not path.is_relative_to(run_dir)]
    assert outside == []
    names = {part for path in run_dir.rglob("*") for part in path.relative_to(run_dir).parts}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in names), names
    assert not names & set(HOSTILE)


SECRET = "planted-4f2c91d07ab3"


class ConfigWithSecret(scripted.ScriptedWorkflowConfig):
    api_key: SecretStr = SecretStr("")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_secret_is_in_no_artefact_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.setattr(scripted, "ScriptedWorkflowConfig", ConfigWithSecret)
    if fails:

        async def fail(self: Any, task: Task, completer: Any) -> Any:
            assert self.config.api_key.get_secret_value() == SECRET
            raise ValueError(f"wrong: {self.config}")

        monkeypatch.setattr(scripted.ScriptedWorkflow, "run", fail)
    error = train(tmp_path / "run", f'say_yes.api_key="{SECRET}"', "rollout.max_consecutive_failures=5")
    assert (error is not None) == fails
    assert SECRET not in str(error)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    assert "api_key" in (tmp_path / "run" / "run.toml").read_text(encoding="utf-8"), "the key is named, not shown"

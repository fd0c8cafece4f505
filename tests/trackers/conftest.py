"""The five trackers, each with its own store in the test's folder, and a network monitor."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The libraries read these at import time. W&B's files outside the run folder go where tests can inspect them.
HOME = Path(tempfile.mkdtemp(prefix="rllm-trackers-"))
os.environ["SWANLAB_PROBE_REQUIREMENTS"] = "false"  # otherwise it runs pip at every start
os.environ |= {"TRACKIO_DIR": str(HOME / "trackio"), "WANDB_CACHE_DIR": str(HOME / "wandb"), "SWANLAB_ROOT": str(HOME)}
for variable in (
    "WANDB_API_KEY",
    "SWANLAB_API_KEY",
    "HF_TOKEN",
    "WANDB_MODE",
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
):
    os.environ.pop(variable, None)

import rllm_trackers  # noqa: E402
from rllm_trackers.library import library  # noqa: E402

import rllm_devkit.scripted_plugin  # noqa: E402 - after the environment
from rllm_core.assembly.parts import Parts, assemble  # noqa: E402
from rllm_core.assembly.resolution import load_run_config  # noqa: E402
from rllm_core.plugins import PluginManager  # noqa: E402
from rllm_core.run_folder.progress import Progress  # noqa: E402
from rllm_core.runs import launch  # noqa: E402
from rllm_viewer.verify import verify  # noqa: E402

LOCAL = ("127.0.0.1", "::1", "localhost")
_reached: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Receives every name lookup and connection by Python code in this process."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):  # not a Unix socket's path
        host = arguments[1][0]
    else:
        return
    if host not in LOCAL:
        _reached.append(f"{event} {host}")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def no_network() -> Iterator[list[str]]:
    _reached.clear()
    yield _reached
    assert _reached == []


@pytest.fixture(scope="session")
def mlflow_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, created once because MLflow takes seconds to create its tables."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    library("mlflow.tracking", tracker="mlflow").MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a test's runs, with an MLflow database next to them in tests of MLflow."""
    folder = tmp_path / "runs"
    folder.mkdir()
    if request.node.callspec.params.get("tracker") == "mlflow":
        shutil.copy(request.getfixturevalue("mlflow_tables"), folder)
    return folder


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    manager.register(rllm_trackers, "trackers")
    return manager


@dataclass
class Run:
    path: Path
    summary: dict[str, Any]
    error: BaseException | None

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def train(plugins: PluginManager, runs: Path) -> Callable[..., Run]:
    """Trains the scripted policy for 4 steps with trackers; returns the result, even of a failed run."""

    def run(
        *trackers: str, overrides: tuple[str, ...] = (), resume: bool = False, fails_at: int = 0, path: str = "run"
    ) -> Run:
        small = (
            "training.steps=4",
            "training.groups_per_step=2",
            "training.rollouts_per_group=4",
            "training.validation_rollouts=4",
            "training.validate_every_steps=2",
            "training.checkpoint_every_steps=2",
            f"training.trackers={json.dumps(trackers)}",
        )
        config = load_run_config("say_yes", plugins, overrides=(*small, *overrides), backend="scripted")
        assembly = assemble(config, plugins)
        if fails_at:
            break_update(assembly, fails_at)
        folder = runs / path
        error: BaseException | None = None
        try:
            asyncio.run(launch.train(assembly, folder, resume=resume, progress=Progress()))
        except ConnectionError as raised:
            error = raised
        assert verify(folder).holds
        return Run(folder, json.loads((folder / "summary.json").read_text()), error)

    return run


def break_update(assembly: Parts, step: int) -> None:
    update, calls = assembly.backend.update_policy, iter(range(1, 1000))

    async def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            raise ConnectionError("the machine is gone")
        return await update(*arguments, **options)

    assembly.backend.update_policy = failing  # type: ignore[method-assign]

"""Fixtures: servers, runs against them, and backends in this process."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
os.environ["TINKER_API_KEY"] = os.environ["TINKER_BASE_URL"] = ""

import numpy as np
import pytest
from rllm_tinker.backend import TinkerBackend
from server import PYTHON, TinkerServer, starter_model

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import TrainingSample, token_ids

CACHE = PYTHON.parents[1] / "cache"  # model and compiled programs; deleted together with the environment
COMMAND = Path(sys.executable).with_name("rllm-core")
# Ends a run that hangs. The longest uses minutes of CPU time, of which a machine with a load of 20 gives it a tenth.
RUN_SECONDS = 3600


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs each ``async def`` test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def model() -> Path:
    return starter_model(CACHE)


@pytest.fixture(scope="session")
def session_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """The shared server of this process; each pytest-xdist worker has its own."""
    made = TinkerServer(tmp_path_factory.mktemp("server"), model, CACHE)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def countdown_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """A server whose base model answers in the form of ``countdown``."""
    made = TinkerServer(tmp_path_factory.mktemp("countdown"), starter_model(CACHE, "countdown"), CACHE)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def server(session_server: TinkerServer) -> Iterator[TinkerServer]:
    """A running server that a test may kill; unloads the test's models, because it has few adapter slots."""
    if not session_server.pids:
        session_server.start()
    yield session_server
    if session_server.pids:
        session_server.unload_models()


@dataclass
class Run:
    """A training run in its own process.

    Attributes:
        path: Run folder.
        process: Process of the run.
        log: File with the output of the process.
    """

    path: Path
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        try:
            return self.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run has not ended in {RUN_SECONDS} s; it printed: {self.printed()}")

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    def wait_for_step(self, step: int) -> None:
        """Waits until ``step`` optimizer steps are done."""
        deadline = time.monotonic() + RUN_SECONDS
        while sum(line["event"] == "step" for line in self.events()) < step:
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.1)

    def events(self) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        whole = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in whole if line.endswith("\n")]


StartRun = Callable[..., Run]


def on_server(base_url: str, model: Path) -> list[str]:
    """Overrides that point a run file to ``server``, and the settings that this server needs."""
    return [
        f"model.path={model}",
        f"tinker.base_url={base_url}",
        "tinker.service=skyrl",
        "tinker.rank=8",
        "optimizer.max_grad_norm=1e6",
        "optimizer.warmup_steps=2",
    ]


def settings(base_url: str, model: Path) -> list[str]:
    """A run file for ``server``, as overrides."""
    return [
        *on_server(base_url, model),
        "optimizer.learning_rate=0.005",
        "sort.letters=abcd",
        "algorithm.entropy_coefficient=0.0",
        "training.groups_per_step=8",
        "training.rollouts_per_group=8",
        "training.validation_rollouts=0",
    ]


@pytest.fixture
def start_run(model: Path, tmp_path: Path) -> Iterator[StartRun]:
    """Starts ``rllm-core train``, on workflow ``sort`` or with a run file; kills runs that are alive after the test."""
    runs: list[Run] = []

    def start(
        server: TinkerServer,
        *overrides: str,
        name: str = "run",
        resume: bool = False,
        key: str = "",
        run_file: Path | None = None,
    ) -> Run:
        path = tmp_path / name
        if resume:
            target, given = ["--resume"], []
        elif run_file is not None:
            target, given = [str(run_file)], [*on_server(server.base_url, server.model), *overrides]
        else:
            target, given = ["sort", "--backend", "tinker"], [*settings(server.base_url, server.model), *overrides]
        command = [str(COMMAND), "train", *target, "--run-dir", str(path)]
        if not resume:
            command += ["--parser", "chat_template"]
        for override in given:
            command += ["-o", override]
        log = tmp_path / f"{name}.{len(runs)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | ({"TINKER_API_KEY": key} if key else {})
            )
        runs.append(Run(path, process, log))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.fixture
def run_config(plugins: PluginManager, model: Path) -> Callable[..., RunConfig]:
    def build(server: TinkerServer, *overrides: str) -> RunConfig:
        return load_run_config(
            "sort",
            plugins,
            overrides=[*settings(server.base_url, model), *overrides],
            backend="tinker",
            parser="chat_template",
        )

    return build


@pytest.fixture
def plugins() -> PluginManager:
    return PluginManager.from_environment()


@pytest.fixture
def make_backend(plugins: PluginManager, run_config: Callable[..., RunConfig]) -> Callable[..., TinkerBackend]:
    """A backend in this process, checked but not yet connected; it tolerates samples with made-up log-probabilities."""

    def make(server: TinkerServer, *overrides: str) -> TinkerBackend:
        backend = assemble(run_config(server, "tinker.sync_tolerance=1000", *overrides), plugins).backend
        assert isinstance(backend, TinkerBackend)
        return backend

    return make


@pytest.fixture
def parser(plugins: PluginManager, run_config: Callable[..., RunConfig], model: Path) -> BaseParser:
    from rllm_renderers.chat_template import ChatTemplateParser

    return ChatTemplateParser.from_model(model)


@pytest.fixture
def prompt_ids(parser: BaseParser) -> Any:
    return token_ids(parser.render([{"role": "user", "content": "sort: dbca"}]))


@pytest.fixture
def sample_of(prompt_ids: Any) -> Callable[..., TrainingSample]:
    """A sample of one turn, whose sampled tokens follow the prompt of the sorting task."""

    def build(completion: Any, advantage: float, *, logprobs: Any = None, version: int = 0) -> TrainingSample:
        completion = token_ids(completion)
        count, start = len(completion), len(prompt_ids)
        return TrainingSample(
            group_id=0,
            rollout_id="rollout",
            token_ids=np.concatenate([prompt_ids, completion]),
            turn_spans=((start, start + count),),
            logprobs=None if logprobs is None else np.array(logprobs, np.float32),
            advantages=np.full(count, advantage, np.float32),
            weight_versions=(version,),
        )

    return build

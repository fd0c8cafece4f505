"""A run on the scripted backend in this process; makes the helpers next to the tests importable."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recount import check_books

import rllm_devkit.scripted_plugin
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

sys.path.insert(0, str(Path(__file__).parent))


@dataclass
class Run:
    """Files and result of a scripted run."""

    path: Path
    summary: dict[str, Any]
    assembly: Parts
    error: BaseException | None

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / f"{name}.jsonl").read_text().splitlines()]


RunScripted = Callable[..., Run]


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    return manager


@pytest.fixture
def run_scripted(plugins: PluginManager, tmp_path: Path) -> RunScripted:
    """Trains the scripted policy; returns the run even if it failed."""

    def run(
        *overrides: str,
        path: Path | None = None,
        backend: str = "scripted",
        resume: bool = False,
        observers: object | None = None,
        prepare: Callable[[Parts], None] | None = None,
        progress: Progress | None = None,
        is_sound: bool = True,
        is_begun: bool = True,
        target: str = "say_yes",
    ) -> Run:
        if observers is not None:
            plugins.register(observers, "observer")
        small = (
            "training.steps=6",
            "training.groups_per_step=4",
            "training.rollouts_per_group=4",
            "training.validation_rollouts=10",
        )
        config = load_run_config(target, plugins, overrides=(*small, *overrides), backend=backend)
        assembly = assemble(config, plugins)
        if prepare is not None:
            prepare(assembly)
        folder = path or tmp_path / "run"
        error: BaseException | None = None
        try:
            asyncio.run(launch.train(assembly, folder, resume=resume, progress=progress or Progress()))
        except (Exception, SystemExit) as raised:
            error = raised
        summary = json.loads((folder / "summary.json").read_text())
        if is_begun:
            assert verify(folder).holds == is_sound
            if is_sound:
                check_books(folder)
        return Run(folder, summary, assembly, error)

    return run

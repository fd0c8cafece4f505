"""Runs of backend ``local`` in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rllm_core.assembly.parts import parts_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch


def train(path: Path, plugins: PluginManager, workflow: str, *overrides: str) -> Path:
    """Trains the starter model on a workflow, and returns the run folder."""
    resolved = resolve_run(workflow, plugins, overrides=overrides, backend="local")
    asyncio.run(launch.train(parts_of(resolved), path, resume=False, progress=Progress()))
    return path

"""Runs of backend ``local`` in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rllm_core.config import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.training import launch
from rllm_core.training.progress import Progress


def train(path: Path, plugins: PluginManager, workflow: str, *overrides: str) -> Path:
    """Trains the starter model on a workflow, and returns the run folder."""
    config = load_run_config(workflow, plugins, overrides=overrides, backend="local")
    asyncio.run(launch.train(launch.assemble(config, plugins), path, resume=False, progress=Progress()))
    return path

"""The core's side of a comparison: `rllm_core.training.launch.train`, as ``rllm-core train`` calls it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sides import Gate, serve
from benchmarks.trials import Row
from benchmarks.workloads import plugin_manager, run_config
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.training import launch
from rllm_core.training.progress import Progress
from rllm_core.training.validation import ValidationResult

COUNTS = ("sampled_tokens", "trained_tokens", "reward_mean")


class _GatedProgress(Progress):
    """Waits at the gate where the trainer tells people that a step is done."""

    def __init__(self, gate: Gate, config: RunConfig) -> None:
        self._gate = gate
        self._steps = config.training.steps
        self._validates = config.training.validation_rollouts > 0

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """Nothing is allocated yet; without a validation, the first step's time includes the allocation."""
        if self._steps and not self._validates:
            self._gate.open_first()

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`; the first step begins after the first validation."""
        if self._steps and result.step == 0:
            self._gate.open_first()

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        # What is trained depends on the backend's layout, and only some say how much that is.
        counts = {name: metrics[name] for name in COUNTS if name in metrics}
        self._gate.step_ended(metrics["step"], **counts)


def train(request: Row, gate: Gate) -> Row:
    """Train one run, or only validate a model (``steps`` 0).

    Args:
        request: ``workload``, ``model``, ``seed``, ``steps``.
        gate: Where to wait between steps.
    """
    plugins = plugin_manager()
    config = run_config(
        plugins, request["workload"], model=request["model"], seed=request["seed"], steps=request["steps"]
    )
    return train_gated(config, plugins, gate)


def train_gated(config: RunConfig, plugins: PluginManager, gate: Gate) -> Row:
    """Train a run that waits at the gate between steps; what its last validation found."""
    assembly = launch.assemble(config, plugins)
    with tempfile.TemporaryDirectory() as folder:
        progress = _GatedProgress(gate, config)
        summary = asyncio.run(launch.train(assembly, Path(folder) / "run", resume=False, progress=progress))
    validation = summary["validation"][-1] if summary["validation"] else {}
    return {"reward_mean": validation.get("reward_mean"), "solved": validation.get("solved")}


if __name__ == "__main__":
    serve(train)

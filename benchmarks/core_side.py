"""The core's side of a comparison: calls `rllm_core.runs.launch.train` like ``rllm-core train``."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.real_vocabulary import peak_mb
from benchmarks.sides import Gate, serve
from benchmarks.trials import Row
from benchmarks.workloads import plugin_manager, run_config
from rllm_core.assembly.parts import assemble
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.results import ValidationResult
from rllm_core.runs import launch

COUNTS = ("sampled_tokens", "trained_tokens", "reward_mean")


class _GatedProgress(Progress):
    """Waits at the gate whenever the trainer reports the end of a step."""

    def __init__(self, gate: Gate, config: RunConfig) -> None:
        self._gate = gate
        self._steps = config.training.steps
        self._validates = config.training.validation_rollouts > 0

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`. Without validation, the first step's time includes allocation."""
        if self._steps and not self._validates:
            self._gate.open_first()

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`. The first step starts after the first validation."""
        if self._steps and result.step == 0:
            self._gate.open_first()

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        # Not all backends report the number of trained tokens, which depends on their layout.
        counts = {name: metrics[name] for name in COUNTS if name in metrics}
        self._gate.step_ended(metrics["step"], peak_mb=peak_mb(), **counts)


def train(request: Row, gate: Gate) -> Row:
    """Trains one run, or only validates a model (``steps`` 0).

    Args:
        request: ``workload``, ``model``, ``seed`` and ``steps``; ``hidden``, a module to do without as if it were not
            installed; ``device``, by default the CPU.
        gate: Gate at which to wait between steps.
    """
    if "hidden" in request:
        sys.modules[request["hidden"]] = None  # type: ignore[assignment]
    plugins = plugin_manager()
    config = run_config(
        plugins,
        request["workload"],
        model=request["model"],
        seed=request["seed"],
        steps=request["steps"],
        device=request.get("device", "cpu"),
    )
    return train_gated(config, plugins, gate)


def train_gated(config: RunConfig, plugins: PluginManager, gate: Gate) -> Row:
    """Trains a run that waits at the gate between steps; returns the result of its last validation."""
    assembly = assemble(config, plugins)
    with tempfile.TemporaryDirectory() as folder:
        progress = _GatedProgress(gate, config)
        summary = asyncio.run(launch.train(assembly, Path(folder) / "run", resume=False, progress=progress))
    validation = summary["validation"][-1] if summary["validation"] else {}
    return {"reward_mean": validation.get("reward_mean"), "solved": validation.get("solved")}


if __name__ == "__main__":
    serve(train)

"""Reads the facts about a run's model from its folder: run file, checkpoints and validations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_core.assembly.resolution import Resolved, resolve_run
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint
from rllm_viewer.results import run_file_of, validations


def resolved_run(run: Path, plugins: PluginManager) -> Resolved:
    """Resolves the run file of a run.

    Raises:
        ConfigError: If the folder has none, or its run file is invalid here.
        PluginError: If a plugin of the run is missing or broken.
    """
    return resolve_run(str(run_file_of(run)), plugins)


def checkpoint_of(run: Path, step: int | None) -> Path:
    """Returns the folder of a complete checkpoint, for a step or the latest.

    Raises:
        ConfigError: If there is no such checkpoint.
    """
    found = checkpoint.complete(run / "checkpoints")
    if not found:
        raise ConfigError(f"run folder {run} has no complete checkpoint")
    if step is None:
        return found[-1]
    wanted = checkpoint.step_folder(run / "checkpoints", step)
    if wanted not in found:
        steps = ", ".join(str(int(path.name.rpartition("-")[2])) for path in found)
        raise ConfigError(f"run folder {run} has no complete checkpoint of step {step}, only of {steps}")
    return wanted


def last_validation(run: Path, step: int) -> dict[str, Any] | None:
    """Returns the last validation event up to a step, or None."""
    return next((event for event in reversed(validations(run)) if event["step"] <= step), None)

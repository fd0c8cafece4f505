"""Compares runs: differing settings and versions, validations, and last metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError, RunError
from rllm_viewer.plot import line_of, smoothed, window_of
from rllm_viewer.results import DAMAGED, metrics_of, tables_of, validations


@dataclass(frozen=True)
class ComparedRun:
    """The parts of a run that are compared.

    Attributes:
        path: Run folder.
        settings: Settings of the run file, keyed by ``section.key``.
        versions: Versions at its last launch, by name.
        validations: Its validations, in order.
        metrics: Its metrics, one object per step.
    """

    path: Path
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    validations: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]


def read(path: Path) -> ComparedRun:
    """Reads a run.

    Raises:
        ConfigError: If the folder is not a run folder.
        RunError: If one of its files is damaged.
    """
    settings = _flat(tables_of(path))
    try:
        starts = path / "plugins.json"
        launches = json.loads(starts.read_text(encoding="utf-8")) if starts.is_file() else []
        versions = {name: str(value) for name, value in _flat(launches[-1] if launches else {}).items()}
        measured, metrics = validations(path), metrics_of(path)
        for row in (*measured, *metrics):
            row["step"] = int(row["step"])
        return ComparedRun(path, settings, versions, measured, metrics)
    except RunError:
        raise
    except DAMAGED as error:
        raise RunError(f"run folder {path} is damaged: {type(error).__name__}: {error}") from error


def differing(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the names whose values differ between mappings, with each mapping's value; None where absent."""
    names = sorted({name for mapping in values for name in mapping})
    missing = object()
    found = {}
    for name in names:
        of_runs = [mapping.get(name, missing) for mapping in values]
        if any(value != of_runs[0] or type(value) is not type(of_runs[0]) for value in of_runs[1:]):
            found[name] = [None if value is missing else value for value in of_runs]
    return found


def by_step(runs: Sequence[ComparedRun], measure: str) -> dict[int, list[float | None]]:
    """Returns a measure of the validations by step, with one value per run; None where a run has none."""
    of_runs = [{row["step"]: row.get(measure) for row in run.validations} for run in runs]
    steps = sorted({step for values in of_runs for step, value in values.items() if value is not None})
    return {step: [values.get(step) for values in of_runs] for step in steps}


def last_metrics(runs: Sequence[ComparedRun]) -> dict[str, list[float | None]]:
    """Returns the metrics of each run's last step, by name; None where a run lacks one."""
    last = [run.metrics[-1] if run.metrics else {} for run in runs]
    names = dict.fromkeys(name for metrics in last for name in metrics)
    return {name: [metrics.get(name) for metrics in last] for name in names}


def curve_of(runs: Sequence[ComparedRun]) -> str | None:
    """Returns the metric to draw: the reward if any run has one, else the loss, else None."""
    for name in ("reward_mean", "loss"):
        if any(metrics.get(name) is not None for run in runs for metrics in run.metrics):
            return name
    return None


def plot(runs: Sequence[ComparedRun], labels: Sequence[str], file: Path) -> None:
    """Draws the reward, or else the loss, of all runs over their steps, together with their validations.

    Raises:
        ConfigError: If the file exists or cannot be written, matplotlib is not installed, or there is nothing to draw.
    """
    if file.exists():
        raise ConfigError(f"{file} exists; choose another name")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it with: pip install rllm-core[plots]") from None
    name = curve_of(runs)
    if name is None:
        raise ConfigError("there is nothing to plot: no run has trained a step with a reward or a loss")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    validated = "reward_mean" if name == "reward_mean" else "nll_per_token"
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        color = f"C{number}"
        steps, values = line_of(run.metrics, name)
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(values, window_of(len(values))), color=color, linewidth=1.8)
        points = [(row["step"], row[validated]) for row in run.validations if row.get(validated) is not None]
        marks = list(zip(*points, strict=True)) or [(), ()]
        axes.plot(*marks, color=color, marker="o", linestyle="none")
        # A dollar sign in the name would start a formula.
        axes.plot([], [], color=color, linewidth=1.8, label=label.replace("$", r"\$"))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward (circles: validations)" if name == "reward_mean" else "loss (circles: validations)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    try:
        figure.savefig(file, dpi=120, format=file.suffix[1:] or "png")  # with a format, the name is kept
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error}") from error


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found

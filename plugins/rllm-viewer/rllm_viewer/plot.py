"""Plots a run."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core.run_folder.journal import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

_KEYS = {"reward": "reward_mean", "loss": "loss"}
_VALIDATIONS = {
    "reward_mean": ("validation reward", "o", "tab:orange"),
    "solved": ("validation solve rate", "s", "tab:green"),
    "nll_per_token": ("validation", "o", "tab:orange"),
}
_PANELS = {
    "solved": ("solved", "solved (share)"),
    "response_tokens_mean": ("length", "tokens per trajectory"),
    "staleness_mean": ("staleness", "weight versions"),
}
_SMOOTHED_SHARE = 0.05


def plot_reward(run_dir: Path) -> Path | None:
    """Draws ``reward.png``: training reward per step, its mean over a window, and the validations.

    A run without rewards gets ``loss.png`` instead, with its loss and its validations' likelihood.

    Returns:
        Path of the plot, or None if matplotlib (extra ``[plots]``) is not installed.
    """
    rows = read_json_lines(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    figure = drawn(rows, summary["validation"], run_dir.name)
    if figure is None:
        return None
    path = run_dir / f"{_what(rows)}.png"
    figure.savefig(path, dpi=120)
    return path


def notes(run_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """Draws the plot of an ended run, and returns why it could not; no failure here may fail anything else."""
    if not summary.get("optimizer_steps"):
        return []
    try:
        return ["no reward.png: pip install 'rllm-core[plots]'"] if plot_reward(run_dir) is None else []
    except Exception as error:  # a full disk, or a bug in matplotlib
        reason = error.strerror if isinstance(error, OSError) else None
        return [" ".join(f"no reward.png: {reason or f'{type(error).__name__}: {error}'}".split())]


def drawn(rows: Rows, validations: Rows, name: str) -> Figure | None:
    """Draws the figure of `plot_reward`, or returns None without matplotlib.

    Args:
        rows: Metrics of the steps.
        validations: Results of the validations.
        name: Name of the run folder.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None

    class Shown(Figure):
        """Displayable in a notebook without pyplot, which would keep the figure open."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    panels = {key: labels for key, labels in _PANELS.items() if _points(rows, key)}
    figure = Shown(figsize=(8, 6 if panels else 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if panels else 1, max(len(panels), 1), height_ratios=[3, 1] if panels else None)
    axes = figure.add_subplot(grid[0, :])
    _draw_main(axes, rows, validations)
    # A dollar sign in the folder name would start a formula.
    axes.set_title(_as_text(name), parse_math=False)
    for column, (key, (title, unit)) in enumerate(panels.items()):
        panel = figure.add_subplot(grid[1, column])
        steps, values = line_of(rows, key)
        panel.plot(steps, values, color="tab:blue", linewidth=1, marker="." if len(steps) < 30 else None)
        panel.set_title(title, fontsize="small")
        panel.set_ylabel(unit, fontsize="x-small")
        panel.tick_params(labelsize="x-small")
        _finish(panel, [value for _, value in _points(rows, key)])
    return figure


def _draw_main(axes: Axes, rows: Rows, validations: Rows) -> None:
    what = _what(rows)
    steps, values = line_of(rows, _KEYS[what])
    shown = [value for _, value in _points(rows, _KEYS[what])]
    edges = [_points(rows, f"trajectory_reward_{edge}") for edge in ("min", "max")]
    if what == "reward" and all(edges):
        _, bottom = line_of(rows, "trajectory_reward_min")
        _, top = line_of(rows, "trajectory_reward_max")
        axes.fill_between(
            steps, bottom, top, color="tab:blue", alpha=0.08, linewidth=0, label="range of the trajectories"
        )
        shown += [value for edge in edges for _, value in edge]
    window = window_of(len(values))
    few = window == 1
    if shown:
        axes.plot(
            steps,
            values,
            color="tab:blue",
            alpha=1 if few else 0.35,
            linewidth=1.2 if few else 0.8,
            marker="." if few else None,
            label=f"training {what}",
        )
    if not few:
        axes.plot(
            steps, smoothed(values, window), color="tab:blue", linewidth=1.8, label=f"mean of {window} steps, centered"
        )
    for key, (label, marker, color) in _VALIDATIONS.items():
        found = _points(validations, key)
        if found:
            at, measured = [step for step, _ in found], [value for _, value in found]
            axes.plot(at, measured, marker=marker, color=color, linestyle="none", label=label)
            if key != "solved":
                axes.axhline(measured[0], color=color, linestyle=":", linewidth=1, label="first validation")
            shown += measured
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward, solve rate" if what == "reward" else "nats per token")
    _finish(axes, shown)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Returns for each value the mean of the ``window`` (odd) existing values around it; NaN stays NaN.

    Unlike a running mean, it does not lag behind its data.
    """
    means = []
    for at, value in enumerate(values):
        around = [one for one in values[max(0, at - window // 2) : at + window // 2 + 1] if not math.isnan(one)]
        means.append(math.nan if math.isnan(value) else sum(around) / len(around))
    return means


def window_of(count: int) -> int:
    """Returns the smoothing window for a number of values: about a twentieth of it, odd; 1 for few values."""
    return 2 * round(count * _SMOOTHED_SHARE / 2 + 1) + 1 if count >= 20 else 1


def _finish(axes: Axes, values: Sequence[float]) -> None:
    """Leaves room around equal values; matplotlib would zoom in until rounding errors show."""
    axes.grid(alpha=0.3)
    axes.locator_params(axis="x", integer=True)
    if values and max(values) - min(values) < 1e-6 * max(1.0, abs(values[0])):
        margin = max(0.5 * abs(values[0]), 0.5)
        axes.set_ylim(values[0] - margin, values[0] + margin)


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Returns step and value of each row with a finite number."""
    return [(row["step"], float(row[key])) for row in rows if _is_number(row.get(key))]


def line_of(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of all rows; a missing value is NaN, and leaves a gap in the line."""
    return [row["step"] for row in rows], [float(row[key]) if _is_number(row.get(key)) else math.nan for row in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _what(rows: Rows) -> str:
    return "reward" if any("reward_mean" in row for row in rows) else "loss"


def _as_text(name: str) -> str:
    """Converts a file name to printable text: decodes undecodable bytes as UTF-8, with replacements."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name).decode(errors="replace")
    return name

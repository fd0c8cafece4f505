"""Plot of a run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core.run_folder.journal import read_json_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEYS = {"reward": "reward_mean", "loss": "loss"}
_VALIDATIONS = {
    "reward_mean": ("validation reward", "o", "tab:orange"),
    "solved": ("validation solve rate", "s", "tab:green"),
    "nll_per_token": ("validation", "o", "tab:orange"),
}


def plot_reward(run_dir: Path) -> Path | None:
    """Draws ``reward.png``: training reward per step, its running mean, and the validations.

    A run without rewards gets ``loss.png`` instead, with its loss and the likelihood in validations.

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


def drawn(rows: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], name: str) -> Figure | None:
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
        """A notebook shows it, also without pyplot, which would keep it open."""

        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    figure = Shown(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    what = _what(rows)
    in_plot = [row for row in rows if _KEYS[what] in row]
    steps, values = [row["step"] for row in in_plot], [row[_KEYS[what]] for row in in_plot]
    running, mean = [], None
    for value in values:
        mean = value if mean is None else 0.9 * mean + 0.1 * value
        running.append(mean)
    axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8, label=f"training {what}")
    axes.plot(steps, running, color="tab:blue", linewidth=1.8, label="running mean (0.9)")
    for key, (label, marker, color) in _VALIDATIONS.items():
        points = [(v["step"], v[key]) for v in validations if v.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=1.2, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward, solve rate" if what == "reward" else "nats per token")
    # A dollar sign in the folder name must not start a formula.
    axes.set_title(_as_text(name), parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    return figure


def _what(rows: Sequence[Mapping[str, Any]]) -> str:
    return "reward" if any("reward_mean" in row for row in rows) else "loss"


def _as_text(name: str) -> str:
    """Converts a file name to printable text: decodes undecodable bytes as UTF-8, with replacements."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name).decode(errors="replace")
    return name

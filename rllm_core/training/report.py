"""The picture of a run."""

from __future__ import annotations

import json
from pathlib import Path

from rllm_core.training.journal import read_json_lines


def plot_reward(run_dir: Path) -> Path | None:
    """Draw ``reward.png``: training reward per step, its running mean, and the validations.

    Returns:
        The picture, or None if matplotlib (extra ``[plots]``) is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = read_json_lines(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, rewards = [row["step"] for row in rows], [row["reward_mean"] for row in rows]
    running, mean = [], None
    for reward in rewards:
        mean = reward if mean is None else 0.9 * mean + 0.1 * reward
        running.append(mean)
    axes.plot(steps, rewards, color="tab:blue", alpha=0.3, linewidth=0.8, label="training reward")
    axes.plot(steps, running, color="tab:blue", linewidth=1.8, label="running mean (0.9)")
    for key, marker, colour in (("reward_mean", "o", "tab:orange"), ("solved", "s", "tab:green")):
        points = [(v["step"], v[key]) for v in summary["validation"] if v[key] is not None]
        if points:
            label = "validation reward" if key == "reward_mean" else "validation solved"
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, linewidth=1.2, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward, share solved")
    axes.set_title(run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path

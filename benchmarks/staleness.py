"""Solve rates with stale weights, with and without off-policy corrections.

    python -m benchmarks.staleness                  # measures everything; writes docs/staleness.md and its plot
    python -m benchmarks.staleness --seeds 1000 --etas 0 4 --no-docs

Trains the starter task ``sort`` on ``local`` with separated generation, at ``staleness_threshold`` (eta) 0, 1, 4 and 8:
uncorrected, with PPO's ratio to the sampling policy, with truncated importance weights per token, and decoupled.
Weights change during rollouts, so staleness is measured, not assumed. Figures per method and eta:
``METHOD_etaN_solved_after_mean``, ``..._min`` and ``..._staleness_mean``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.algorithms import command
from benchmarks.learning import measured, outcome, read_lines
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

SEEDS = (1000, 1001, 1002)
ETAS = (0, 1, 4, 8)
TOKEN_TIS = {"proximal_policy": "forward", "corrections": "['token_tis']"}
METHODS: dict[str, dict[str, str]] = {
    "uncorrected": {"loss": "reinforce"},
    "ppo": {"loss": "ppo_clip"},
    "token_tis": {"loss": "reinforce", **TOKEN_TIS},
    "decoupled": {"loss": "ppo_clip", "proximal_policy": "forward", "corrections": "['importance']"},
}
TITLES = {
    "uncorrected": "none (`reinforce`)",
    "ppo": "ratio to the policy that sampled (`ppo_clip`)",
    "token_tis": "token TIS (`reinforce`, `token_tis`)",
    "decoupled": "decoupled PPO (`ppo_clip`, `importance`)",
}
PAGE = ROOT / "docs" / "staleness.md"
PLOT = ROOT / "docs" / "images" / "staleness.svg"
EXPLANATION = """\
The *staleness* of a group is the number of weight updates between the weights that sampled it and those that it trains:

![Three groups with staleness 0, 2 and 2](images/age.svg)

[`training.staleness_threshold`](run-file/training.md) limits how far generation runs ahead, and with it the staleness.
[Asynchronous training](asynchronous-training.md) gains time from it; this page measures what it costs.
"""
# Inverts lightness and keeps hues, for readers of dark pages.
DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(0.88) hue-rotate(180deg)}}"


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every method at every eta on every seed, one at a time, because a busy core would change the staleness."""
    environment = {**os.environ, **SETTINGS}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            measured([sys.executable, "-m", "rllm_local.starter", "--seed", str(seed)], environment)
            for eta in options.etas:
                for method in options.methods:
                    run_dir = Path(temporary) / f"{method}-{eta}-{seed}"
                    made = command(METHODS[method], seed, run_dir)
                    for setting in (
                        "local.generation=separated",
                        f"training.staleness_threshold={eta}",
                        f"training.partial_rollout={str(eta > 0).lower()}",
                        f"training.steps={options.steps}",
                        f"optimizer.learning_rate={options.learning_rate}",
                    ):
                        made += ["-o", setting]
                    seconds = measured(made, environment)
                    trials.add(_row(run_dir, method, eta, seed) | seconds)
                    print(json.dumps(trials.rows[-1]), file=sys.stderr, flush=True)


def _row(run_dir: Path, method: str, eta: int, seed: int) -> Row:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    metrics = read_lines(run_dir / "metrics.jsonl")
    return {
        "kind": "run",
        "method": method,
        "eta": eta,
        "seed": seed,
        **outcome(summary),
        "staleness_mean": round(statistics.fmean(step["staleness_mean"] for step in metrics), 3),
        "staleness_max": max(step["staleness_max"] for step in metrics),
    }


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    found: Figures = {}
    for method, eta in sorted({(row["method"], row["eta"]) for row in of_kind(rows, "run")}):
        runs = of_kind(rows, "run", method=method, eta=eta)
        name = f"{method}_eta{eta}"
        found[f"{name}_solved_after_mean"] = round(statistics.fmean(row["solved_after"] for row in runs), 4)
        found[f"{name}_solved_after_min"] = round(min(row["solved_after"] for row in runs), 4)
        found[f"{name}_staleness_mean"] = round(statistics.fmean(row["staleness_mean"] for row in runs), 2)
    found["seeds"] = len({row["seed"] for row in of_kind(rows, "run")})
    return found


# --------------------------------------------------------------------------------------------------------------------
# Documentation page


def page(rows: Sequence[Row]) -> str:
    """Formats ``docs/staleness.md``, with a table of all methods and etas."""
    runs = of_kind(rows, "run")
    etas = sorted({row["eta"] for row in runs})
    settings = next(row["settings"] for row in rows if row["kind"] == "conditions")
    seeds = sorted({row["seed"] for row in runs})
    found = figures(rows)
    lines = [
        "# What staleness costs",
        "",
        "<!-- Written by `python -m benchmarks.staleness`; run that to change it. -->",
        "",
        *EXPLANATION.splitlines(),
        "",
        "Solve rate on held-out words at the end of training: mean over seeds (worst seed). Workflow `sort` on `local` "
        f"with separated generation, {settings['steps']} steps at a learning rate of {settings['learning_rate']:g}, "
        f"seeds {', '.join(map(str, seeds))}. η is `staleness_threshold`.",
        "",
        "| Correction | " + " | ".join(f"η = {eta}" for eta in etas) + " |",
        "|---|" + "---|" * len(etas),
    ]
    for method in [method for method in METHODS if any(row["method"] == method for row in runs)]:
        cells = []
        for eta in etas:
            name = f"{method}_eta{eta}"
            cells.append(f"{found[f'{name}_solved_after_mean']:.3f} ({found[f'{name}_solved_after_min']:.3f})")
        lines.append(f"| {TITLES[method]} | " + " | ".join(cells) + " |")
    ages = [statistics.fmean(row["staleness_mean"] for row in runs if row["eta"] == eta) for eta in etas]
    most = [max(row["staleness_max"] for row in runs if row["eta"] == eta) for eta in etas]
    reached = (f"{age:.1f} ({oldest:.0f})" for age, oldest in zip(ages, most, strict=True))
    lines += ["| *staleness in weight versions, mean (max)* | " + " | ".join(reached) + " |", ""]
    lines += [f"![Solve rate at the end, by staleness threshold and correction](images/{PLOT.name})", ""]
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots one line per method over eta, with one dot per seed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "staleness"
    from matplotlib import pyplot as plt

    runs = of_kind(rows, "run")
    etas = sorted({row["eta"] for row in runs})
    figure, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for number, method in enumerate(method for method in METHODS if any(row["method"] == method for row in runs)):
        means = [
            statistics.fmean(row["solved_after"] for row in runs if (row["method"], row["eta"]) == (method, eta))
            for eta in etas
        ]
        (line,) = axes.plot(range(len(etas)), means, marker="o", label=TITLES[method].replace("`", ""))
        for place, eta in enumerate(etas):
            dots = [row["solved_after"] for row in runs if (row["method"], row["eta"]) == (method, eta)]
            axes.scatter([place + 0.04 * (number - 1.5)] * len(dots), dots, s=9, alpha=0.5, color=line.get_color())
    axes.set_xticks(range(len(etas)), [str(eta) for eta in etas])
    axes.set(xlabel="staleness_threshold", ylabel="solved at the end")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    path.write_text(path.read_text(encoding="utf-8").replace("</style>", f"{DARK}</style>", 1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--etas", nargs="+", type=int, default=list(ETAS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps per run")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate of every run")
    parser.add_argument("--no-docs", action="store_true", help="do not write docs/staleness.md and its plot")

    def measure_and_write(chosen: argparse.Namespace, trials: RawTrials) -> None:
        measure(chosen, trials)
        if not chosen.no_docs:
            PAGE.write_text(page(trials.rows), encoding="utf-8")
            plot(trials.rows, PLOT)

    run("staleness", parser, measure_and_write, figures, arguments)


if __name__ == "__main__":
    main()

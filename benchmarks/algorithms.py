"""Final solve rates of the starter task with each of the main algorithms.

    python -m benchmarks.algorithms
    python -m benchmarks.algorithms --algorithms grpo gspo --seeds 1000

Each algorithm trains ``sort`` with ``rllm-core train`` in a separate process. Only ``[algorithm]`` differs from the
workflow's run file. Figures per algorithm: ``..._solved_after_min`` and ``..._solved_after_mean`` over the seeds, and
``..._cpu_seconds`` (median). Also ``solved_before_max``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.learning import measured, outcome
from benchmarks.peer_environments import SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

SEEDS = (1000, 1001, 1002)
CLIP_HIGHER = "{clip_low = 0.2, clip_high = 0.28}"
ALGORITHMS: dict[str, dict[str, str]] = {
    "grpo": {"name": "grpo"},
    "grpo_ppo_clip": {"name": "grpo", "loss": "ppo_clip"},
    "grpo_kl": {"name": "grpo", "loss": "ppo_clip", "kl.coefficient": "0.001"},
    "dr_grpo": {"name": "dr_grpo", "loss": "ppo_clip", "aggregation": "sequence_mean_token_sum_norm"},
    "dapo": {
        "name": "grpo",
        "loss": "ppo_clip",
        "loss_options": CLIP_HIGHER,
        "filter_uniform_groups": "true",
        # Without refilling, because nearly all words are solved in the end. Without an overlong penalty, because
        # correct answers fill the token budget.
        "refill_filtered_groups": "false",
    },
    "rloo": {"name": "rloo"},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "loss": "ppo_clip"},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", "loss": "ppo_clip"},
    "gspo": {"name": "grpo", "loss": "gspo", "aggregation": "sequence_mean_token_mean"},
    "cispo": {"name": "grpo", "loss": "cispo"},
}


def command(changes: dict[str, str], seed: int, run_dir: Path) -> list[str]:
    """Returns the command line that trains ``sort`` with settings of ``[algorithm]``."""
    made = [str(Path(sys.executable).with_name("rllm-core")), "train", "sort", "--backend", "local"]
    made += ["--run-dir", str(run_dir), "-o", f"training.seed={seed}", "-o", f"local.starter_seed={seed}"]
    for key, value in changes.items():
        made += ["-o", f"algorithm.{key}={value}"]
    return made


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every algorithm on every seed."""
    environment = {**os.environ, **SETTINGS}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as executor:
        for seed in options.seeds:
            measured([sys.executable, "-m", "rllm_local.starter", "--seed", str(seed)], environment)

        def train(name: str, seed: int) -> Row:
            run_dir = Path(temporary) / f"{name}-{seed}"
            seconds = measured(command(ALGORITHMS[name], seed, run_dir), environment)
            summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
            return {"kind": "run", "algorithm": name, "seed": seed, **seconds, **outcome(summary)}

        wanted = [(name, seed) for seed in options.seeds for name in options.algorithms]
        for row in executor.map(lambda job: train(*job), wanted):
            trials.add(row)
            print(json.dumps(row), file=sys.stderr, flush=True)


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    found: Figures = {}
    for name in ALGORITHMS:
        runs = of_kind(rows, "run", algorithm=name)
        if runs:
            found[f"{name}_solved_after_min"] = round(min(row["solved_after"] for row in runs), 4)
            found[f"{name}_solved_after_mean"] = round(statistics.fmean(row["solved_after"] for row in runs), 4)
            found[f"{name}_cpu_seconds"] = round(statistics.median(row["cpu_seconds"] for row in runs), 1)
    runs = of_kind(rows, "run")
    if runs:
        found["solved_before_max"] = round(max(row["solved_before"] for row in runs), 4)
        found["seeds"] = len({row["seed"] for row in runs})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs (default 2)")
    run("algorithms", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

"""What runs cost, predicted before and counted after.

    python -m benchmarks.costs
    python -m benchmarks.costs --recipes sort --steps 60

For each recipe, a pilot of a third of the steps runs on a seed of its own. ``rllm-core train --dry-run --like PILOT``
then predicts the costs of a longer run on another seed, which is trained afterwards with the workflow's own settings.
The error is the difference between the predicted tokens and those in ``summary.json``, as a share of the latter.
Figures: ``prediction_error_max`` over the recipes (goal: at most 0.20), and the error of each recipe; likewise
``call_prediction_error_max`` for calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import measured
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

RECIPES = ("sort", "guess", "calculator", "solver_judge")
STEPS = 60
PILOT_SHARE = 3
PILOT_SEED, SEED = 1001, 1000


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Predicts and trains every recipe."""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            row = trial(recipe, options.steps, Path(folder))
            trials.add(row)
            print(json.dumps(row), file=sys.stderr, flush=True)


def trial(recipe: str, steps: int, folder: Path) -> Row:
    """Runs the pilot, predicts, trains, and compares."""
    pilot = folder / f"{recipe}-pilot"
    measured(command(recipe, steps // PILOT_SHARE, PILOT_SEED, "--run-dir", str(pilot)), environment())
    predicting = command(recipe, steps, SEED, "--dry-run", "--json", "--like", str(pilot))
    said = subprocess.run(predicting, env=environment(), check=True, capture_output=True, text=True).stdout
    predicted: dict[str, Any] = json.loads(said.splitlines()[-1])["prediction"]
    run_dir = folder / recipe
    seconds = measured(command(recipe, steps, SEED, "--run-dir", str(run_dir)), environment())
    actual: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["costs"]
    return {
        "kind": "prediction",
        "recipe": recipe,
        "steps": steps,
        "error": abs(predicted["tokens"] - actual["tokens"]) / actual["tokens"],
        "call_error": abs(predicted["calls"] - actual["calls"]) / actual["calls"],
        "predicted": predicted,
        "actual": actual,
        **seconds,
    }


def command(recipe: str, steps: int, seed: int, *more: str) -> list[str]:
    """Returns the command that trains a recipe."""
    rllm_core = [sys.executable, "-m", "rllm_core", "train", recipe, "--backend", "local"]
    return [*rllm_core, "-o", f"training.steps={steps}", "-o", f"training.seed={seed}", *more]


def environment() -> dict[str, str]:
    """Returns the variables of the commands."""
    return {**os.environ, **SETTINGS}


def figures(rows: Sequence[Row]) -> Figures:
    """Returns the error of each recipe, and the largest."""
    trials = of_kind(rows, "prediction")
    found: Figures = {f"{row['recipe']}_prediction_error": round(row["error"], 4) for row in trials}
    found["prediction_error_max"] = round(max(row["error"] for row in trials), 4)
    found["call_prediction_error_max"] = round(max(row["call_error"] for row in trials), 4)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run, {STEPS} by default")
    os.chdir(ROOT)
    run("costs", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

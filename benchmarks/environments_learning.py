"""Solve rates and CPU time of the starter model on environments of other packages, unedited.

    python -m benchmarks.environments_learning
    python -m benchmarks.environments_learning --environments spell_backward --seeds 1000 1001

Each trial trains one environment on one seed with ``rllm-core train``, in a process of its own and with an empty cache,
so that its CPU seconds contain the warm start of a model made from scratch. Settings are those that the workflow has
for the environment, and what `ENVIRONMENTS` adds. Figures for each environment:

- ``NAME_solved_before_max`` and ``NAME_solved_after_min``: share of validation rollouts solved, of the worst seed.
- ``NAME_cpu_seconds_max``: CPU seconds of the whole command.

Runs in the environment that has the environment's package; ``make test-environments`` creates them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning import measured, outcome, read_lines
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

SEEDS = range(1000, 1003)
ENVIRONMENTS_PYTHON = ".venv-environments"
VALIDATION_ROLLOUTS = 512


@dataclass(frozen=True)
class Learned:
    """An environment that the starter model learns.

    Attributes:
        target: What ``rllm-core train`` trains.
        held_out: What validation tasks hold out; "" if nothing.
        overrides: Settings beside the workflow's own.
        python: Virtual environment that has its package.
    """

    target: str
    held_out: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    python: str = ENVIRONMENTS_PYTHON


ENVIRONMENTS: dict[str, Learned] = {
    "spell_backward": Learned(
        "reasoning_gym/spell_backward",
        held_out="words that are not in training, in any case of letters",
        overrides={"reasoning_gym.options": {"min_word_len": 3, "max_word_len": 3}},
    ),
}


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every environment on every seed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as executor:
        started = [
            executor.submit(trained, name, seed, Path(folder))
            for seed in options.seeds
            for name in options.environments
        ]
        for trial in started:
            row = trial.result()
            trials.add(row)
            print(json.dumps(row), file=sys.stderr, flush=True)


def trained(name: str, seed: int, folder: Path) -> Row:
    """Trains an environment from scratch, and returns what it cost and the results."""
    about = ENVIRONMENTS[name]
    run_dir = folder / f"{name}-{seed}"
    command = [str(ROOT / about.python / "bin" / "rllm-core"), "train", about.target, "--backend", "local"]
    own = {
        "training.seed": seed,
        "local.starter_seed": seed,
        "training.validation_rollouts": VALIDATION_ROLLOUTS,
        **about.overrides,
    }
    for key, value in own.items():
        command += ["-o", f"{key}={toml(value)}"]
    environment = {**os.environ, **SETTINGS, "RLLM_CACHE_DIR": str(folder / f"cache-{name}-{seed}")}
    seconds = measured([*command, "--run-dir", str(run_dir)], environment)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    steps = read_lines(run_dir / "metrics.jsonl")
    curve = [round(step["solved"], 3) for step in steps[:: max(1, len(steps) // 25)]]
    about_trial = {"kind": "training", "environment": name, "held_out": about.held_out, "seed": seed}
    return {**about_trial, **seconds, **outcome(summary), "curve": curve}


def toml(value: Any) -> str:
    """Writes a value of an override: one that JSON and TOML write alike, or an inline table of such."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the worst seeds."""
    found: Figures = {}
    for name in ENVIRONMENTS:
        runs = of_kind(rows, "training", environment=name)
        if runs:
            found[f"{name}_solved_before_max"] = round(max(row["solved_before"] for row in runs), 4)
            found[f"{name}_solved_after_min"] = round(min(row["solved_after"] for row in runs), 4)
            found[f"{name}_cpu_seconds_max"] = max(row["cpu_seconds"] for row in runs)
            found[f"{name}_seeds"] = len(runs)
    return found


def enter(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Restarts the benchmark in the virtual environment of its trials, which creates it if there is none."""
    os.environ.update(SETTINGS)
    for folder in sorted({ENVIRONMENTS[name].python for name in names}):
        if not (ROOT / folder / ".installed").is_file():
            subprocess.run(["make", f"{folder}/.installed"], check=True, cwd=ROOT, stdout=sys.stderr)
    python = ROOT / ENVIRONMENTS_PYTHON / "bin" / "python"
    if Path(sys.prefix).resolve() != (ROOT / ENVIRONMENTS_PYTHON).resolve():
        os.chdir(ROOT)
        os.execv(python, [str(python), "-m", "benchmarks.environments_learning", *arguments])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments_learning", description=__doc__)
    parser.add_argument("--environments", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, help="parallel trials (default 2; 1 gives lower CPU seconds)")
    known, _ = parser.parse_known_args([each for each in given if not each.startswith("--from-raw")])
    if "--from-raw" not in given:
        enter(known.environments, given)
    run("environments_learning", parser, measure, figures, given)


if __name__ == "__main__":
    main()

"""Solve rates and CPU time of the starter model on unedited environments from other packages.

    python -m benchmarks.environments_learning
    python -m benchmarks.environments_learning --environments spell_backward --seeds 1000 1001

Each trial trains one environment on one seed with ``rllm-core train``, in a process of its own and with an empty cache,
so that its CPU seconds contain the warm start of a model made from scratch. Settings are those that the workflow has
for the environment, and what `ENVIRONMENTS` adds. Figures for each environment:

- ``NAME_solved_before_max`` and ``NAME_solved_after_min``: share of validation rollouts solved, of the worst seed. For
  ``tictactoe`` the share not lost.
- ``minigrid_solved_random``, ``tictactoe_not_lost_random``: the same share of random legal play.
- ``NAME_cpu_seconds_max``: CPU seconds of the whole command.
- ``verifiers_margin``: smallest gain of a seed; it should reach 0.3.

Runs in the environment that has the environment's package; ``make test-environments`` creates them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
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
        needs: Virtual environment with its packages, separate from the one that trains.
        metric: What counts as success: ``solved``, or a metric of the workflow.
    """

    target: str
    held_out: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    metric: str = "solved"


ENVIRONMENTS: dict[str, Learned] = {
    "spell_backward": Learned(
        "reasoning_gym/spell_backward",
        held_out="words that are not in training, in any case of letters",
        overrides={"reasoning_gym.options": {"min_word_len": 3, "max_word_len": 3}},
    ),
    "frozenlake": Learned("examples/gymnasium/frozen-lake.toml", held_out=""),
    "minigrid": Learned("examples/gymnasium/red-ball.toml", held_out="states in which no training game starts"),
    "tictactoe": Learned(
        "examples/textarena/tic-tac-toe.toml", held_out="seeds of the other player", metric="not_lost"
    ),
    "verifiers": Learned(
        "examples/verifiers/earliest.toml", held_out="questions that are not in training", needs=(".venv-verifiers",)
    ),
}
RANDOM_GAMES = 2000


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every environment on every seed."""
    for name, share in RANDOM_PLAY.items():
        if name in options.environments:
            trials.add({"kind": "random play", "environment": name, ENVIRONMENTS[name].metric: share()})
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


def not_lost_at_random() -> float:
    """Returns the share of tic-tac-toe games that a first player with random legal moves does not lose."""
    from rllm_environments.textarena.workflow import TextArenaConfig, TextArenaWorkflow, scripted_turn

    workflow = TextArenaWorkflow(TextArenaConfig(environment="TicTacToe-v0", seat=0))
    rng, kept = random.Random(0), 0
    for seed in range(RANDOM_GAMES):
        game = workflow.made(seed)
        while not game.is_over:
            scripted_turn(game, rng)
        kept += game.rewards().get(0, 0.0) >= 0
    return kept / RANDOM_GAMES


def solved_at_random() -> float:
    """Returns the share of validation games of the red ball that random actions solve."""
    from rllm_environments.gymnasium_text.workflow import GymnasiumConfig, GymnasiumWorkflow

    run_file = tomllib.loads((ROOT / ENVIRONMENTS["minigrid"].target).read_text(encoding="utf-8"))
    environment = run_file["workflow"].partition("/")[2]
    settings = {**run_file["gymnasium"], "environment": environment, "validation_tasks": RANDOM_GAMES}
    workflow = GymnasiumWorkflow(GymnasiumConfig.model_validate(settings))
    game, rng, solved = workflow.made(), random.Random(0), 0
    for task in workflow.tasks("validation"):
        game.reset(task.data["seed"])
        while not (shown := game.act(rng.choice(game.legal_actions(rng)))).is_over:
            pass
        solved += shown.reward > 0
    return solved / RANDOM_GAMES


RANDOM_PLAY = {"minigrid": solved_at_random, "tictactoe": not_lost_at_random}


def trained(name: str, seed: int, folder: Path) -> Row:
    """Trains an environment from scratch, and returns what it cost and the results."""
    about = ENVIRONMENTS[name]
    run_dir = folder / f"{name}-{seed}"
    target = str(ROOT / about.target) if about.target.endswith(".toml") else about.target
    command = [str(ROOT / ENVIRONMENTS_PYTHON / "bin" / "rllm-core"), "train", target, "--backend", "local"]
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
    before, after = (
        validation["solved"] if about.metric == "solved" else validation["metrics"][about.metric]
        for validation in (summary["validation"][0], summary["validation"][-1])
    )
    about_trial = {"kind": "training", "environment": name, "held_out": about.held_out, "seed": seed}
    return {**about_trial, **seconds, **outcome(summary), "before": before, "after": after, "curve": curve}


def toml(value: Any) -> str:
    """Writes a value of an override: one that JSON and TOML write alike, or an inline table of such."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the worst seeds."""
    found: Figures = {}
    for name, about in ENVIRONMENTS.items():
        runs = of_kind(rows, "training", environment=name)
        if runs:
            found[f"{name}_{about.metric}_before_max"] = round(max(row["before"] for row in runs), 4)
            found[f"{name}_{about.metric}_after_min"] = round(min(row["after"] for row in runs), 4)
            found[f"{name}_cpu_seconds_max"] = max(row["cpu_seconds"] for row in runs)
            found[f"{name}_seeds"] = len(runs)
        if runs and name == "verifiers":
            found["verifiers_margin"] = round(min(row["after"] - row["before"] for row in runs), 4)
        for row in of_kind(rows, "random play", environment=name):
            found[f"{name}_{about.metric}_random"] = row[about.metric]
    return found


def enter(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Restarts the benchmark in the virtual environment of its trials, which creates it if there is none."""
    os.environ.update(SETTINGS)
    for folder in sorted({ENVIRONMENTS_PYTHON, *(folder for name in names for folder in ENVIRONMENTS[name].needs)}):
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

"""Rollouts that task samplers need to reach the same solved share, on words of 2 to 12 letters to sort.

    python -m benchmarks.curriculum
    python -m benchmarks.curriculum --seeds 1003 1004 --keep

Every trial trains `benchmarks.graded_sort` from the same starter model on one seed. Groups of equal rewards are
filtered and replaced, with all samplers. Of the first groups, about four in five are solved by none of their rollouts:
most tasks teach nothing, as with real data of mixed difficulty. The arms:

- ``uniform``: the built-in sampler, for three times the budget of `BUDGET` optimizer steps.
- ``difficulty``: that of rllm-samplers, with the lengths as ``subsets`` and otherwise its defaults.
- ``pools``: prime-rl's difficulty pools, rebuilt in `benchmarks.curriculum_pools`.
- ``no_subsets``: ``difficulty`` with its defaults, which knows no lengths.

The target of a seed is .95 of the share of held-out words that ``uniform`` solves after three times the budget. A trial
of another arm is over at its first validation that reaches the target, or at the first after which it has used as many
rollouts as ``uniform`` in all; the words of the validations are the same for all. Counted are all training rollouts
that were started until then: trained, filtered and those in progress. A trial that never reaches the target counts with
all of its rollouts, and is named in ``not_reached``.

The task, the budget, the target, the seeds and the samplers were fixed after pilot runs on seeds 2000 to 2002, before
any trial of `SEEDS`.

Figures: ``rollouts_over_uniform``, ``rollouts_over_pools`` and ``rollouts_over_no_subsets``, the medians over the seeds
of the rollouts of ``difficulty`` over those of the other arm. ``ARM_solved_after`` is the learning curve: the mean over
the seeds of the solved share after some numbers of rollouts, between validations by interpolation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, raw_path, read_rows, run

SEEDS = range(1000, 1005)
BUDGET = 30
TARGET = 0.95
NAME = "curriculum"
ARMS = {
    "uniform": ["training.sampler=uniform"],
    "difficulty": ["training.sampler=difficulty", "training.sampler_options={subsets='length'}"],
    "pools": [f"training.sampler={ROOT / 'benchmarks' / 'curriculum_pools.py'}"],
    "no_subsets": ["training.sampler=difficulty"],
}
POLL_SECONDS = 0.5
CURVE_AT = (5000, 10_000, 15_000)  # no trial of the five seeds was over earlier


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every arm on every seed; ``uniform`` first, since it sets the target."""
    for row in options.kept:
        trials.add(row)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            last = None
            for arm in ARMS:
                row = trained(arm, seed, Path(folder) / f"{arm}-{seed}", last)
                last = row["curve"][-1] if arm == "uniform" else last
                trials.add(row)
                print(json.dumps(row), file=sys.stderr, flush=True)


def trained(arm: str, seed: int, run_dir: Path, uniform: Row | None) -> Row:
    """Trains for three times the budget, or against the last validation of ``uniform`` if there is one."""
    steps = 3 * BUDGET if uniform is None else 20 * BUDGET  # never as many: they take more rollouts than ``uniform``
    command = [sys.executable, "-m", "rllm_core", "train", str(ROOT / "benchmarks" / "graded_sort.py")]
    command += ["--backend", "local", "--run-dir", str(run_dir)]
    for setting in (f"training.steps={steps}", f"training.seed={seed}", *ARMS[arm]):
        command += ["-o", setting]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **SETTINGS}, stdout=subprocess.DEVNULL)
    is_over = False
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        if not is_over and uniform is not None and is_decided(curve(run_dir), uniform):
            is_over = True
            process.send_signal(signal.SIGINT)
        time.sleep(POLL_SECONDS)
    _, status, usage = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    # On a busy machine, a run that was stopped may not save its checkpoint in time; its curve is complete all the same.
    if process.returncode not in ((128 + signal.SIGINT, 1) if is_over else (0,)):
        raise subprocess.CalledProcessError(process.returncode, command)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return {
        "kind": "training",
        "arm": arm,
        "seed": seed,
        "steps": summary["optimizer_steps"],
        "exit_status": process.returncode,
        "books": summary["books_by_reason"],
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "curve": curve(run_dir),
    }


def is_decided(found: Sequence[Row], uniform: Row) -> bool:
    """Whether a validation reaches the target, or comes after as many rollouts as the last one of ``uniform``."""
    target = TARGET * uniform["solved"]
    return any(one["solved"] >= target or one["rollouts"] >= uniform["rollouts"] for one in found)


def curve(run_dir: Path) -> list[Row]:
    """Returns step, training rollouts so far and solved share of each validation; also of a run in progress."""
    path = run_dir / "events.jsonl"
    if not path.is_file():
        return []
    rollouts, found = 0, []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # in progress
        event = json.loads(line)
        if event["event"] == "dispatch":
            rollouts += event["rollouts"]
        elif event["event"] == "validation":
            lengths = {name: round(value, 4) for name, value in sorted(event["metrics"].items())}
            found.append({"step": event["step"], "rollouts": rollouts, "solved": round(event["solved"], 4), **lengths})
    return found


def rollouts_to(target: float, row: Row) -> tuple[int, bool]:
    """Returns the rollouts of a trial until its first validation that reaches the target, and whether one does."""
    reached = [one["rollouts"] for one in row["curve"] if one["solved"] >= target]
    return (reached[0], True) if reached else (row["curve"][-1]["rollouts"], False)


def solved_at(rollouts: int, curve: Sequence[Row]) -> float:
    """Returns the solved share after a number of rollouts, between validations by interpolation."""
    return float(np.interp(rollouts, [one["rollouts"] for one in curve], [one["solved"] for one in curve]))


def figures(rows: Sequence[Row]) -> Figures:
    """Compares the arms seed by seed."""
    of_seed: dict[int, dict[str, int]] = {}
    not_reached, targets = [], []
    for uniform in of_kind(rows, "training", arm="uniform"):
        target, seed = TARGET * uniform["curve"][-1]["solved"], uniform["seed"]
        targets.append(round(target, 4))
        of_seed[seed] = {}
        for row in of_kind(rows, "training", seed=seed):
            of_seed[seed][row["arm"]], is_reached = rollouts_to(target, row)
            not_reached += [] if is_reached else [f"{row['arm']} {seed}"]
    found: Figures = {"seeds": len(of_seed), "targets": targets, "not_reached": not_reached}
    for arm in ARMS:
        if counts := [of_arm[arm] for of_arm in of_seed.values() if arm in of_arm]:
            found[f"{arm}_rollouts_median"] = median(counts)
            curves = [row["curve"] for row in of_kind(rows, "training", arm=arm)]
            found[f"{arm}_solved_after"] = {
                at: round(fmean(solved_at(at, one) for one in curves), 3) for at in CURVE_AT
            }
    for other in (arm for arm in ARMS if arm != "difficulty"):
        pairs = [of_arm for of_arm in of_seed.values() if of_arm.keys() >= {"difficulty", other}]
        ratios = [of_arm["difficulty"] / of_arm[other] for of_arm in pairs]
        if ratios:
            found[f"rollouts_over_{other}"] = round(median(ratios), 4)
            found[f"rollouts_over_{other}_by_seed"] = [round(ratio, 4) for ratio in ratios]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curriculum", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    parser.add_argument("--keep", action="store_true", help="keep the trials of other seeds from an earlier run")
    known, _ = parser.parse_known_args(arguments)
    kept = read_rows(raw_path(NAME)) if known.keep and raw_path(NAME).is_file() else []
    parser.set_defaults(kept=[row for row in kept if row["kind"] == "training" and row["seed"] not in known.seeds])
    os.chdir(ROOT)
    run(NAME, parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

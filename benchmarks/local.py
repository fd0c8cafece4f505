"""Speed of backend ``local`` relative to TRL and transformers, on one thread.

    python -m benchmarks.local

Figures: ``steps_per_second_over_trl``, ``steps_per_second_over_trl_long``, the same ``..._without_extra``, which hides
the extra ``rllm-local[fast]``, ``tokens_per_second_over_hf_generate``, ``reward_after_equal_steps``,
``real_vocabulary_steps_per_second_over_trl``, ``real_vocabulary_peak_over_trl``,
``real_vocabulary_peak_over_bare_transformers``. Creates the environment ``.venv-bench`` with TRL on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer_environments import enter_peer_environment
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

WARM_UP_STEPS = 2
PARTS = ("sampling", "sort", "endless", "real_vocabulary")
STEPS_PER_SECOND = {
    "sort": "steps_per_second_over_trl",
    "endless": "steps_per_second_over_trl_long",
    "real_vocabulary": "real_vocabulary_steps_per_second_over_trl",
}
WITHOUT_EXTRA = "core_without_extra"
PEAKS = {"trl": "real_vocabulary_peak_over_trl", "bare": "real_vocabulary_peak_over_bare_transformers"}


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts."""
    from rllm_local.starter import starter_model

    from benchmarks import sampling
    from benchmarks.endless import make_endless_model
    from benchmarks.real_vocabulary import make_real_vocabulary_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        starter = starter_model(0)
        if "sampling" in options.parts:
            models = {"starter": starter, "half_million": sampling.make_random_model(folder / "half_million")}
            sampling.measure(models, trials, options.sampling_trials)
        if "sort" in options.parts:
            for seed in range(options.rounds):
                train_in_turns("sort", starter, seed, options.steps, folder, trials)
        if "endless" in options.parts:
            model = make_endless_model(starter, folder / "endless")
            train_in_turns("endless", model, 0, options.long_steps, folder, trials)
        if "real_vocabulary" in options.parts:
            model = make_endless_model(make_real_vocabulary_model(folder / "real"), folder / "real_endless")
            train_in_turns("real_vocabulary", model, 0, options.real_steps, folder, trials)
            train_bare(model, trials)


def train_in_turns(workload: str, model: Path, seed: int, steps: int, folder: Path, trials: RawTrials) -> None:
    """Trains both sides from the same weights, taking turns at every step, then compares their rewards."""
    from benchmarks.sides import Side, take_turns

    with contextlib.ExitStack() as stack:
        core, trl = (stack.enter_context(Side(name, f"benchmarks.{name}_side")) for name in ("core", "trl"))
        request = {"workload": workload, "model": str(model), "seed": seed, "steps": steps}
        saved = str(folder / f"trl-{workload}-{seed}")
        sides, requests = [core, trl], [request, {**request, "save_to": saved}]
        if workload == "endless":
            sides.append(stack.enter_context(Side(WITHOUT_EXTRA, "benchmarks.core_side")))
            requests.append({**request, "hidden": "numba"})
        about = {"workload": workload, "seed": seed}
        for side, row in take_turns(sides, requests, steps):
            trials.add({"kind": "step", **about, "side": side.name, **row})
        ours, *_ = [side.end() for side in sides]
        if ours["reward_mean"] is not None:
            theirs = core.run({**request, "model": saved, "steps": 0})
            trials.add({"kind": "trained", **about, "steps": steps, "side": "core", **ours})
            trials.add({"kind": "trained", **about, "steps": steps, "side": "trl", **theirs})


def train_bare(model: Path, trials: RawTrials) -> None:
    """Trains with a bare loop of transformers, for its memory."""
    from benchmarks.sides import Side

    with Side("bare", "benchmarks.real_vocabulary") as bare:
        bare.begin({"workload": "real_vocabulary", "model": str(model), "seed": 0, "steps": WARM_UP_STEPS + 1})
        for _ in range(WARM_UP_STEPS + 1):
            row = {"kind": "step", "workload": "real_vocabulary", "seed": 0, "side": "bare", **bare.step()}
            trials.add(row)
        bare.end()


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the measured parts."""
    found: Figures = {}
    for workload, name in STEPS_PER_SECOND.items():
        if of_kind(rows, "step", workload=workload):
            sides = {row["side"]: None for row in of_kind(rows, "step", workload=workload)}
            for side, ending in (("core", ""), (WITHOUT_EXTRA, "_without_extra")):
                if side in sides:
                    found[f"{name}{ending}"] = round(steps_ratio(rows, workload, "wall_seconds", side), 2)
                    found[f"{name}{ending}_cpu"] = round(steps_ratio(rows, workload, "cpu_seconds", side), 2)
            found[f"{workload}_step_ms"] = {
                side: round(1e3 * statistics.median(step_seconds(rows, workload, side, "wall_seconds").values()), 1)
                for side in sides
                if side != "bare"
            }
    if peaks := peaks_mb(rows):
        found["real_vocabulary_peak_mb"] = peaks
        found |= {name: round(peaks["core"] / peaks[side], 2) for side, name in PEAKS.items()}
    if of_kind(rows, "sampling"):
        by_model = sampling_ratios(rows, "wall_seconds")
        found["tokens_per_second_over_hf_generate"] = min(by_model.values())
        found["tokens_per_second_over_hf_generate_by_model_and_batch"] = by_model
        found["tokens_per_second_over_hf_generate_cpu"] = min(sampling_ratios(rows, "cpu_seconds").values())
    if of_kind(rows, "trained"):
        found["reward_after_equal_steps"] = {
            name: round(statistics.mean(row["reward_mean"] for row in of_kind(rows, "trained", side=side)), 3)
            for name, side in (("ours", "core"), ("trl", "trl"))
        }
    return found


def peaks_mb(rows: Sequence[Row]) -> dict[str, int]:
    """Returns the largest resident memory of each side with a real vocabulary."""
    steps = of_kind(rows, "step", workload="real_vocabulary")
    sides = {row["side"] for row in steps}
    return {side: round(max(row["peak_mb"] for row in steps if row["side"] == side)) for side in sorted(sides)}


def step_seconds(rows: Sequence[Row], workload: str, side: str, clock: str) -> dict[tuple[int, int], float]:
    """Returns seconds by seed and step, without the warm-up steps of each run."""
    steps = of_kind(rows, "step", workload=workload, side=side)
    return {(row["seed"], row["step"]): row[clock] for row in steps if row["step"] > WARM_UP_STEPS}


def steps_ratio(rows: Sequence[Row], workload: str, clock: str, side: str = "core") -> float:
    """Returns the steps that a side of ours does in the time of one TRL step: the median over adjacent steps."""
    core, trl = (step_seconds(rows, workload, name, clock) for name in (side, "trl"))
    return paired_ratio((core[step], trl[step]) for step in core.keys() & trl.keys())


def sampling_ratios(rows: Sequence[Row], clock: str) -> dict[str, float]:
    """Returns tokens per second relative to transformers, by model and batch: medians over adjacent trials."""
    seconds: dict[str, dict[str, dict[int, float]]] = {}
    for row in of_kind(rows, "sampling"):
        place = seconds.setdefault(f"{row['model']}/{row['batch']}", {}).setdefault(row["side"], {})
        place[row["trial"]] = row[clock] / row["tokens"]
    return {
        place: round(paired_ratio((core, sides["transformers"][trial]) for trial, core in sides["core"].items()), 2)
        for place, sides in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given: list[str] = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the starter task, each with another seed")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps per run")
    parser.add_argument("--long-steps", type=int, default=10, help="optimizer steps with long completions")
    parser.add_argument("--real-steps", type=int, default=6, help="optimizer steps with a real vocabulary")
    parser.add_argument("--sampling-trials", type=int, default=15, help="trials per model, batch and side")
    if not any(argument.startswith("--from-raw") for argument in given) and not {"-h", "--help"} & set(given):
        enter_peer_environment("benchmarks.local", given)
    run("local", parser, measure, figures, given)


if __name__ == "__main__":
    main()

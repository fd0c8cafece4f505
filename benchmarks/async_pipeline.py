"""Speed gained by asynchrony, measured with the real trainer on a virtual clock.

    python -m benchmarks.async_pipeline

Trainer, coordinator, buffer, generation, journal and checkpoints are those of ``rllm-core train``. Engine and backend
are scripted, and the event loop's clock jumps from one timer to the next, so hours take seconds. Figures:
``ideal_share_eta4``, ``speedup_over_sync_eta4``, ``drain_speedup_over_sync`` and, per mode, the other columns of the
table. `rllm_viewer.verify` checks every run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rllm_devkit.scripted_plugin
from benchmarks import virtual_clock
from benchmarks.simulated import TRAIN_SECONDS, SimulatedBackend, SimulationPlugin
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

SLOTS = 256
GROUPS_PER_STEP = 64
ROLLOUTS_PER_GROUP = 8
FILLING_STEPS = 10
"""First steps, in which the pipeline fills; counted in ``..._with_start`` only."""


@dataclass(frozen=True)
class Mode:
    """Settings of ``[training]``."""

    name: str
    staleness_threshold: float = 0.0
    partial_rollout: bool = False
    staleness: str = "quota"


MODES = (
    Mode("synchronous"),
    Mode("one_step_off", 1.0),
    Mode("drained_eta4", 4.0),
    Mode("in_flight_eta0.5", 0.5, True),
    Mode("in_flight_eta1", 1.0, True),
    Mode("in_flight_eta2", 2.0, True),
    Mode("in_flight_eta4", 4.0, True),
    Mode("strict_eta4", 4.0, True, "strict"),
)


NO_TAIL_MODES = ("synchronous", "one_step_off", "in_flight_eta1", "in_flight_eta4")


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Simulates every mode, with the same rollout times in all of them."""
    jobs = [(mode, 1.0, options.steps) for mode in MODES]
    jobs += [(mode, 0.0, options.no_tail_steps) for mode in MODES if mode.name in NO_TAIL_MODES]
    for mode, deviation, steps in jobs:
        with tempfile.TemporaryDirectory() as temporary:
            row = simulate(mode, steps, options.seed, Path(temporary) / "run", log_standard_deviation=deviation)
        trials.add(row)
        print(f"{mode.name}: {row['real_seconds']:.0f} s", file=sys.stderr, flush=True)
    for deviation, title in ((1.0, "a long tail"), (0.0, "all rollouts equally long")):
        print(f"{title}\n{table(of_kind(trials.rows, 'run', log_standard_deviation=deviation))}\n", flush=True)


def simulate(mode: Mode, steps: int, seed: int, folder: Path, *, log_standard_deviation: float = 1.0) -> Row:
    """Simulates one run.

    Raises:
        RuntimeError: If verification fails.
    """
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(SimulationPlugin(), "simulation")
    settings = {
        "training.steps": steps,
        "training.seed": seed,
        "training.groups_per_step": GROUPS_PER_STEP,
        "training.rollouts_per_group": ROLLOUTS_PER_GROUP,
        "training.staleness_threshold": mode.staleness_threshold,
        "training.partial_rollout": str(mode.partial_rollout).lower(),
        "training.staleness": mode.staleness,
        "training.validation_rollouts": 0,
        "training.trajectories_per_step": 0,
        "rollout.max_concurrent_rollouts": SLOTS,
        "simulated.log_standard_deviation": log_standard_deviation,
        "own_prompts.tasks": GROUPS_PER_STEP * 10,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_run_config("own_prompts", plugins, overrides=overrides, backend="simulated")
    assembly = assemble(config, plugins)
    began, cpu = time.monotonic(), time.process_time()
    summary = virtual_clock.run(launch.train(assembly, folder, resume=False, progress=Progress()))
    real, cpu = time.monotonic() - began, time.process_time() - cpu
    checked = verify(folder)
    if not checked.holds:
        raise RuntimeError(f"verification of mode {mode.name} failed: {checked.problems[:3]}")
    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    ages = ages_of_groups(folder / "events.jsonl")
    assert isinstance(assembly.backend, SimulatedBackend)
    seconds = assembly.backend.rollout_seconds
    return {
        "kind": "run",
        "mode": mode.name,
        "log_standard_deviation": log_standard_deviation,
        "steps": steps,
        "seed": seed,
        "step_seconds": [round(row["step_seconds"], 3) for row in timings],
        "generation_wait_seconds": [round(row["generation_wait_seconds"], 3) for row in timings],
        "groups_by_staleness": {str(age): count for age, count in sorted(ages.items())},
        "max_staleness_verified": checked.max_staleness,
        "max_lead_groups": checked.max_lead,
        "rollouts": len(seconds),
        "rollout_seconds_mean": statistics.fmean(seconds),
        "books": summary["books"],
        "real_seconds": round(real, 2),
        "cpu_seconds": round(cpu, 2),
    }


def ages_of_groups(journal: Path) -> Counter[int]:
    """Counts trained groups by staleness, in weight versions."""
    sampled: dict[int, int] = {}
    ages: Counter[int] = Counter()
    for line in journal.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "enqueue":
            sampled[event["group"]] = event["weight_version"]
        elif event["event"] == "consume":
            ages.update(event["weight_version"] - sampled[group] for group in event["groups"])
    return ages


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """The figures of what was simulated."""
    runs = {row["mode"]: row for row in of_kind(rows, "run", log_standard_deviation=1.0)}
    no_tail = {row["mode"]: row for row in of_kind(rows, "run", log_standard_deviation=0.0)}
    synchronous, eta4 = step_seconds(runs["synchronous"]), step_seconds(runs["in_flight_eta4"])
    return {
        "ideal_share_eta4": round(ideal_seconds(runs["in_flight_eta4"]) / eta4, 3),
        "ideal_share_eta4_with_start": round(
            ideal_seconds(runs["in_flight_eta4"]) / statistics.fmean(runs["in_flight_eta4"]["step_seconds"]), 3
        ),
        "speedup_over_sync_eta4": round(synchronous / eta4, 2),
        "drain_speedup_over_sync": round(synchronous / step_seconds(runs["drained_eta4"]), 2),
        "speedup_over_sync": {name: round(synchronous / step_seconds(row), 2) for name, row in runs.items()},
        "no_tail_speedup_over_sync": {
            name: round(step_seconds(no_tail["synchronous"]) / step_seconds(row), 2) for name, row in no_tail.items()
        },
        "ideal_step_seconds": round(ideal_seconds(runs["in_flight_eta4"]), 1),
        "steps": runs["in_flight_eta4"]["steps"],
    }


def step_seconds(row: Row) -> float:
    """Returns the mean virtual seconds of a step once the pipeline is full."""
    steps: list[float] = row["step_seconds"]
    return statistics.fmean(steps[FILLING_STEPS:])


def ideal_seconds(row: Row) -> float:
    """Returns ``max(g, t)``: the time with all slots always busy, or the trainer always busy."""
    generation: float = row["rollout_seconds_mean"] * GROUPS_PER_STEP * ROLLOUTS_PER_GROUP / SLOTS
    return max(generation, TRAIN_SECONDS)


def staleness(row: Row) -> tuple[float, int, int]:
    """Returns mean, 99th percentile and maximum staleness of the trained groups."""
    ages = sorted(int(age) for age, count in row["groups_by_staleness"].items() for _ in range(count))
    return statistics.fmean(ages), ages[math.ceil(0.99 * len(ages)) - 1], ages[-1]


def table(runs: Sequence[Row]) -> str:
    """Formats a table that compares the runs with the first one."""
    synchronous = step_seconds(runs[0])
    lines = [f"{'mode':<18} {'step s':>7} {'speed-up':>9} {'% of ideal':>11} {'staleness mean/p99/max':>23}"]
    for row in runs:
        seconds, (mean, p99, most) = step_seconds(row), staleness(row)
        share = 100 * ideal_seconds(row) / seconds
        lines.append(
            f"{row['mode']:<18} {seconds:>7.1f} {synchronous / seconds:>9.2f} {share:>11.1f} "
            f"{f'{mean:.2f} / {p99} / {most}':>23}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_pipeline", description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps per mode")
    parser.add_argument("--no-tail-steps", type=int, default=30, help="steps per mode, equally long rollouts")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and rollout times")
    run("async_pipeline", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

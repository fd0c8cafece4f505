"""Speed and solve rate of asynchronous training on backend ``local``, with a workflow that waits between turns.

    python -m benchmarks.local_async
    python -m benchmarks.local_async --modes synchronous in_flight_eta1 --seeds 1000 --steps 50

Every mode trains the game ``guess`` with its own run file, in one process, from the same starter model per seed. After
each guess, the rollout waits for a while (`benchmarks.waiting`). The modes of a seed run one after the other, in
reverse order for odd seeds. Figures: ``local_async_over_sync`` and, per mode, ``..._over_sync`` (wall and CPU seconds
per step), ``step_ms``, ``solved_after_min``, ``solved_after_mean`` and ``staleness_mean``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import waiting
from benchmarks.learning import outcome, read_lines
from benchmarks.peer_environments import SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

WARM_UP_STEPS = 5
"""First steps, in which the pipeline fills."""


@dataclass(frozen=True)
class Mode:
    """Placement of the engine, and settings of ``[training]``."""

    name: str
    generation: str = "separated"
    staleness_threshold: float = 0.0
    partial_rollout: bool = False

    def overrides(self) -> list[str]:
        """Returns the overrides for `load_run_config`."""
        return [
            f"local.generation={self.generation}",
            f"training.staleness_threshold={self.staleness_threshold}",
            f"training.partial_rollout={str(self.partial_rollout).lower()}",
        ]


SYNCHRONOUS = Mode("synchronous", "colocated")
IN_FLIGHT = Mode("in_flight_eta1", staleness_threshold=1.0, partial_rollout=True)
"""Setting recommended in the documentation for asynchronous training on ``local``."""

MODES = {
    mode.name: mode
    for mode in (
        SYNCHRONOUS,
        Mode("synchronous_separated"),
        Mode("drained_eta1", staleness_threshold=1.0),
        IN_FLIGHT,
        Mode("in_flight_eta2", staleness_threshold=2.0, partial_rollout=True),
    )
}


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every seed in every mode."""
    os.environ.update(SETTINGS)
    for seed in options.seeds:
        for name in options.modes if seed % 2 == 0 else reversed(options.modes):
            with tempfile.TemporaryDirectory() as temporary:
                row = train(MODES[name], seed, options.steps, Path(temporary) / "run")
            trials.add(row)
            print(json.dumps({k: v for k, v in row.items() if k != "step_seconds"}), file=sys.stderr, flush=True)


def configured(plugins: PluginManager, mode: Mode, seed: int, steps: int | None) -> RunConfig:
    """Resolves the run file of ``guess`` for a mode; ``steps`` defaults to the run file's."""
    settings = [f"training.seed={seed}", f"local.starter_seed={seed}", "local.device=cpu", *mode.overrides()]
    if steps is not None:
        settings.append(f"training.steps={steps}")
    return load_run_config("waiting_guess", plugins, overrides=settings, backend="local")


def train(mode: Mode, seed: int, steps: int | None, folder: Path) -> Row:
    """Trains one run.

    Raises:
        RuntimeError: If verification fails.
    """
    plugins = PluginManager.from_environment()
    plugins.register(waiting, "waiting")
    assembly = assemble(configured(plugins, mode, seed, steps), plugins)
    assembly.backend.model_path()  # creates the starter model, which is not part of the run
    wall, cpu = time.perf_counter(), time.process_time()
    summary = asyncio.run(launch.train(assembly, folder, resume=False, progress=Progress()))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    checked = verify(folder)
    if not checked.holds:
        raise RuntimeError(f"verification of mode {mode.name} failed: {checked.problems[:3]}")
    metrics, timings = read_lines(folder / "metrics.jsonl"), read_lines(folder / "timings.jsonl")
    return {
        "kind": "run",
        "mode": mode.name,
        "seed": seed,
        **outcome(summary),
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "step_seconds": [round(row["step_seconds"], 4) for row in timings],
        "generation_wait_seconds": round(sum(row["generation_wait_seconds"] for row in timings), 2),
        "staleness_mean": round(statistics.fmean(row["staleness_mean"] for row in metrics), 3),
        "staleness_max": checked.max_staleness,
    }


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures; ratios are medians over the seeds."""
    found: Figures = {}
    synchronous = {row["seed"]: row for row in of_kind(rows, "run", mode=SYNCHRONOUS.name)}
    for name in MODES:
        runs = of_kind(rows, "run", mode=name)
        if not runs:
            continue
        pairs = [(synchronous[row["seed"]], row) for row in runs if row["seed"] in synchronous]
        if pairs and name != SYNCHRONOUS.name:
            wall = paired_ratio((step_seconds(first), step_seconds(second)) for first, second in pairs)
            found[f"{name}_over_sync"] = round(wall, 3)
            cpu = paired_ratio((first["cpu_seconds"], second["cpu_seconds"]) for first, second in pairs)
            found[f"{name}_over_sync_cpu"] = round(cpu, 3)
        found[f"{name}_step_ms"] = round(1000 * statistics.median(step_seconds(row) for row in runs))
        found[f"{name}_solved_after_min"] = round(min(row["solved_after"] for row in runs), 4)
        found[f"{name}_solved_after_mean"] = round(statistics.fmean(row["solved_after"] for row in runs), 4)
        found[f"{name}_staleness_mean"] = round(statistics.fmean(row["staleness_mean"] for row in runs), 2)
        found[f"{name}_seeds"] = len(runs)
    if f"{IN_FLIGHT.name}_over_sync" in found:
        found["local_async_over_sync"] = found[f"{IN_FLIGHT.name}_over_sync"]
    return found


def step_seconds(row: Row) -> float:
    """Returns the mean wall seconds of a step once the pipeline is full; a mean, as asynchronous steps are uneven."""
    return statistics.fmean(row["step_seconds"][WARM_UP_STEPS:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_async", description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1000, 1001, 1002])
    parser.add_argument("--steps", type=int, help="optimizer steps per run (default: the run file's)")
    run("local_async", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

"""Concurrent rollouts per process, and the cost of the core's bookkeeping.

    python -m benchmarks.orchestrator

Runs ten thousand rollouts at a time, on the real clock, through the trainer with a scripted engine:
``wall_over_ideal``, ``loop_lag_p99_ms``, ``extra_mb``; with the suffix ``_at_once``, all rollouts call the engine at
the same moment in every turn. The core's own CPU time, without engine, parser and workflow: ``us_per_turn``,
``us_per_group``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import rllm_devkit.scripted_plugin
from benchmarks import bookkeeping
from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.simulated import SimulationPlugin
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

ROLLOUTS_PER_GROUP = 8
GROUPS_PER_STEP = 50
BEAT_SECONDS = 0.01
BEATS_PER_MEMORY_READING = 10
PARTS = ("concurrency", "bookkeeping")


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts; each concurrency trial runs in a fresh process, to measure its memory."""
    if "concurrency" in options.parts:
        for number, spread in product(range(options.trials), (True, False)):
            command = [sys.executable, "-m", "benchmarks.orchestrator", "--one-trial", "--rollouts", options.rollouts]
            command += ["--turns", options.turns, "--turn-seconds", options.turn_seconds, *["--spread"] * spread]
            done = subprocess.run(
                [str(part) for part in command],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **SETTINGS},
            )
            trials.add({"trial": number, **json.loads(done.stdout.splitlines()[-1])})
            print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    if "bookkeeping" in options.parts:
        bookkeeping.measure(trials, options.bookkeeping_trials)


# --------------------------------------------------------------------------------------------------------------------
# One trial of concurrency


def carry(rollouts: int, turns: int, turn_seconds: float, *, spread: bool) -> Row:
    """Trains with many concurrent rollouts.

    Args:
        rollouts: Number of rollouts, all dispatched at the start.
        turns: Turns per rollout.
        turn_seconds: Duration of every engine call, in seconds.
        spread: Whether environments take up to one turn to start, to spread requests evenly.

    Raises:
        RuntimeError: If verification fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        small = ROLLOUTS_PER_GROUP * GROUPS_PER_STEP
        asyncio.run(
            launch.train(_assembly(small, turns, 0.0, 0.0), Path(temporary) / "warm", resume=False, progress=Progress())
        )
        gc.collect()
        folder = Path(temporary) / "run"
        wait_seconds = turn_seconds if spread else 0.0
        row, summary = asyncio.run(_watched(_assembly(rollouts, turns, turn_seconds, wait_seconds), folder))
        if not verify(folder).holds or summary["books"]["trained"] != rollouts:
            raise RuntimeError(f"verification failed; rollout accounting: {summary['books']}")
    about = {"kind": "concurrency", "spread": spread, "rollouts": rollouts, "turns": turns}
    return {**about, "ideal_seconds": turns * turn_seconds + wait_seconds, **row}


def _assembly(rollouts: int, turns: int, turn_seconds: float, wait_seconds: float) -> Parts:
    """Assembles a run that dispatches all rollouts at once: their groups form one sync window."""
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(SimulationPlugin(), "simulation")
    steps = rollouts // (ROLLOUTS_PER_GROUP * GROUPS_PER_STEP)
    settings = {
        "training.steps": steps,
        "training.groups_per_step": GROUPS_PER_STEP,
        "training.rollouts_per_group": ROLLOUTS_PER_GROUP,
        "training.staleness_threshold": steps - 1,
        "training.partial_rollout": str(steps > 1).lower(),
        "training.validation_rollouts": 0,
        "rollout.max_concurrent_rollouts": rollouts,
        "rollout.max_concurrent_requests": rollouts,
        "own_prompts.tasks": steps * GROUPS_PER_STEP,
        "own_prompts.turns": turns,
        "own_prompts.wait_seconds": wait_seconds,
        "punctual.turn_seconds": turn_seconds,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return assemble(load_run_config("own_prompts", plugins, overrides=overrides, backend="punctual"), plugins)


async def _watched(assembly: Parts, folder: Path) -> tuple[Row, dict[str, Any]]:
    baseline, pulse = resident_bytes(), Pulse()
    beating = asyncio.create_task(pulse.beat())
    began, cpu = time.perf_counter(), time.process_time()
    summary = await launch.train(assembly, folder, resume=False, progress=Progress())
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    beating.cancel()
    lags, alone = sorted(pulse.lags_seconds), sorted(pulse.lags_alone_seconds)
    row = {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "beats": len(lags),
        "lag_p50_ms": 1e3 * percentile(lags, 0.5),
        "lag_p99_ms": 1e3 * percentile(lags, 0.99),
        "lag_max_ms": 1e3 * lags[-1],
        "lag_p99_alone_ms": 1e3 * percentile(alone, 0.99),
        "baseline_bytes": baseline,
        "peak_bytes": pulse.peak_bytes,
    }
    return row, summary


class Pulse:
    """Measures the lag of a heartbeat on the event loop.

    Beats missed while the loop was blocked count too, with the time until the loop was free: a second of blocking is
    a hundred late beats, not one. The lag on a dedicated core is estimated as well: the lag times the share of the core
    that the loop's thread got since the last beat.
    """

    def __init__(self) -> None:
        self.lags_seconds: list[float] = []
        self.lags_alone_seconds: list[float] = []
        self.peak_bytes = 0

    async def beat(self) -> None:
        """Beats until cancelled."""
        before, cpu_before = time.perf_counter(), time.thread_time()
        due = before + BEAT_SECONDS
        while True:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            now, cpu = time.perf_counter(), time.thread_time()
            share = min((cpu - cpu_before) / (now - before), 1.0)
            before, cpu_before = now, cpu
            while due <= now:
                self.lags_seconds.append(now - due)
                self.lags_alone_seconds.append(share * (now - due))
                due += BEAT_SECONDS
                if len(self.lags_seconds) % BEATS_PER_MEMORY_READING == 0:
                    self.peak_bytes = max(self.peak_bytes, resident_bytes())


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of all values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes medians over the trials and the worst trial."""
    found: Figures = {}
    for spread, ending in ((True, ""), (False, "_at_once")):
        trials = of_kind(rows, "concurrency", spread=spread)
        for name, values in (
            ("wall_over_ideal", [row["wall_seconds"] / row["ideal_seconds"] for row in trials]),
            ("loop_lag_p99_ms", [row["lag_p99_ms"] for row in trials]),
            ("loop_lag_p99_ms_cpu", [row["lag_p99_alone_ms"] for row in trials]),
            ("loop_lag_max_ms", [row["lag_max_ms"] for row in trials]),
            ("extra_mb", [(row["peak_bytes"] - row["baseline_bytes"]) / 1e6 for row in trials]),
            ("utilisation", [row["cpu_seconds"] / row["wall_seconds"] for row in trials]),
        ):
            if trials:
                found[f"{name}{ending}"] = round(statistics.median(values), 3)
                found[f"{name}{ending}_worst"] = round(max(values), 3)
    return found | bookkeeping.figures(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestrator", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--rollouts", type=int, default=10_000, help="concurrent rollouts; a multiple of 400")
    parser.add_argument("--turns", type=int, default=2, help="turns per rollout")
    parser.add_argument("--turn-seconds", type=float, default=10.0, help="duration of a turn in the engine, in seconds")
    parser.add_argument("--trials", type=int, default=3, help="trials of concurrency")
    parser.add_argument("--bookkeeping-trials", type=int, default=15, help="paired trials of bookkeeping")
    parser.add_argument("--one-trial", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spread", action="store_true", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--one-trial" in given:
        options = parser.parse_args(given)
        row = carry(options.rollouts, options.turns, options.turn_seconds, spread=options.spread)
        print(json.dumps(row))
    else:
        run("orchestrator", parser, measure, figures, given)


if __name__ == "__main__":
    main()

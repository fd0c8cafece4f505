"""How many rollouts one process carries, and what the core's bookkeeping costs.

    python -m benchmarks.orchestrator

Ten thousand rollouts at a time, on the real clock, through the trainer itself with a scripted engine:
``wall_over_ideal``, ``loop_lag_p99_ms``, ``extra_mb``, and with ``_at_once`` the same where all of them ask in one
moment, turn after turn. The core's own CPU time, without engine, parser and workflow: ``us_per_turn``,
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

import rllm_core.testing.plugin
from benchmarks import bookkeeping
from benchmarks.environments import ROOT, SETTINGS
from benchmarks.simulated import SimulationPlugin
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.config import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.training import launch
from rllm_core.training.progress import Progress
from rllm_core.training.verify import verify

ROLLOUTS_PER_GROUP = 8
GROUPS_PER_STEP = 50
BEAT_SECONDS = 0.01
BEATS_PER_MEMORY_READING = 10
PARTS = ("concurrency", "bookkeeping")


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measure all parts; every trial of concurrency has a process of its own, whose memory nothing else has used."""
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
    """Train with ``rollouts`` of them at a time, each of ``turns`` turns of ``turn_seconds``.

    Args:
        rollouts: All are dispatched at the beginning.
        turns: Of each.
        turn_seconds: How long the engine takes, always.
        spread: Environments take up to one turn's time to start, so that requests come evenly.

    Raises:
        RuntimeError: If the run's books do not balance.
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
            raise RuntimeError(f"the books of the run do not balance: {summary['books']}")
    about = {"kind": "concurrency", "spread": spread, "rollouts": rollouts, "turns": turns}
    return {**about, "ideal_seconds": turns * turn_seconds + wait_seconds, **row}


def _assembly(rollouts: int, turns: int, turn_seconds: float, wait_seconds: float) -> launch.Assembly:
    """All rollouts of the run are dispatched at once: their groups are one window."""
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_core.testing.plugin, "testing")
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
    return launch.assemble(load_run_config("own_prompts", plugins, overrides=overrides, backend="punctual"), plugins)


async def _watched(assembly: launch.Assembly, folder: Path) -> tuple[Row, dict[str, Any]]:
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
    """A heartbeat on the event loop: how late each beat came.

    A beat that could not come while something blocked the loop is late, too: it counts with the time until the loop
    was free, so that a second of blocking is a hundred late beats and not one. Beside the lag stands what it
    would be on a core of its own: the lag times the share of the core that the loop's thread got since the last beat.
    """

    def __init__(self) -> None:
        self.lags_seconds: list[float] = []
        self.lags_alone_seconds: list[float] = []
        self.peak_bytes = 0

    async def beat(self) -> None:
        """Beat until cancelled."""
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
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all are not above."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """The figures of what was measured: medians over the trials, and the worst of them."""
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
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestrator", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--rollouts", type=int, default=10_000, help="at a time; a multiple of 400")
    parser.add_argument("--turns", type=int, default=2, help="turns of each")
    parser.add_argument("--turn-seconds", type=float, default=10.0, help="how long the engine takes for one")
    parser.add_argument("--trials", type=int, default=3, help="of concurrency")
    parser.add_argument("--bookkeeping-trials", type=int, default=15, help="pairs")
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

"""Training steps of an agent of openai-agents in worker processes, compared with those of the native workflow.

Runs in the environment ``.venv-agents``, with backend ``local``. An agent and the native workflow train on
``calculator`` from the same starter model with the same settings. A step's CPU time is a slope: a longer run minus a
shorter one.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.learning import measured, read_lines, write_run_file
from benchmarks.trials import Row

FIRST_STEPS = 1


def step(request: Row) -> Iterator[Row]:
    """Trains both sides, several times.

    Args:
        request: ``trials``, ``steps`` and ``workers``.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = dict(os.environ)
        measured([sys.executable, "-m", "rllm_local.starter"], environment)
        run_file = write_run_file("calculator", folder, agent="framework", hide_tools=True, hide_system=True)
        sides = {"native": ["calculator"], "agent": [str(run_file), "-o", f"rollout.workers={request['workers']}"]}
        for trial in range(request["trials"]):
            for side in list(sides)[:: 1 if trial % 2 == 0 else -1]:
                row = trained(sides[side], request["steps"], folder / f"{side}-{trial}", environment)
                yield {"kind": "step", "side": side, "trial": trial, **request, **row}


def trained(what: list[str], steps: int, run_dir: Path, environment: Mapping[str, str]) -> Row:
    """Trains a short and a longer run; returns seconds and CPU seconds per step, and counts of rollouts."""
    costs = {}
    for count in (FIRST_STEPS, FIRST_STEPS + steps):
        folder = run_dir.with_name(f"{run_dir.name}-{count}")
        command = [str(Path(sys.executable).with_name("rllm-core")), "train", *what, "--backend", "local"]
        command += ["--run-dir", str(folder), "-o", f"training.steps={count}", "-o", "training.validation_rollouts=0"]
        command += ["-o", "optimizer.warmup_steps=0"]
        costs[count] = measured(command, dict(environment))["cpu_seconds"]
    short, long = costs
    timings, metrics = read_lines(folder / "timings.jsonl"), read_lines(folder / "metrics.jsonl")
    return {
        "step_seconds": statistics.median(line["step_seconds"] for line in timings[FIRST_STEPS:]),
        "step_cpu_seconds": (costs[long] - costs[short]) / steps,
        "turns_mean": statistics.fmean(line["turns_mean"] for line in metrics),
        "reward_mean": statistics.fmean(line["reward_mean"] for line in metrics),
        "segment_breaks": sum(line["segment_breaks"] for line in metrics),
    }

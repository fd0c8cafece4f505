"""CPU time of a rollout in environments from other packages, without the model.

    python -m benchmarks.environments_cost
    python -m benchmarks.environments_cost --parts verifiers --rollouts 100

Every part runs in the virtual environment that has its package, which ``make test-environments`` creates, with a
scripted engine and 16 rollouts at once. Figures, in milliseconds of CPU per rollout, after 64 rollouts that do not
count:

* ``reasoning_gym_answer_cpu_ms`` (at most 5): one question, which its child process creates, and one answer, which the
  child processes of the checker score. Their CPU time counts.
* ``verifiers_turn_cpu_ms`` (at most 60): one turn of one agent. ``verifiers_agents_cpu_ms``: three turns of two agents.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

PYTHONS = {"reasoning_gym": ".venv-environments", "verifiers": ".venv-verifiers"}
AT_A_TIME = 16
WARM_UP = 64
VERIFIERS_TASKSETS = {"turn": "last_letter", "agents": "higher"}


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts, each in its own environment."""
    for part in options.parts:
        subprocess.run(["make", f"{PYTHONS[part]}/.installed"], check=True, cwd=ROOT, stdout=sys.stderr)
        command = [str(ROOT / PYTHONS[part] / "bin" / "python"), "-m", "benchmarks.environments_cost", "--play", part]
        played = subprocess.run(
            [*command, "--rollouts", str(options.rollouts)],
            check=True,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SETTINGS,
        )
        for line in played.stdout.splitlines():
            trials.add(json.loads(line))
            print(line, file=sys.stderr, flush=True)


def play_reasoning_gym(rollouts: int) -> None:
    """Runs a dataset, and prints a row. Every rollout has its own question, unlike the rollouts of a group in a run."""
    from rllm_environments.reasoning_gym.workflow import ReasoningGymConfig, ReasoningGymWorkflow

    config = ReasoningGymConfig(environment="chain_sum", train_size=rollouts + WARM_UP)
    seconds = asyncio.run(_cpu_seconds(ReasoningGymWorkflow(config), rollouts))
    row = {"kind": "cost", "part": "reasoning_gym", "name": "answer", "cpu_ms": 1000 * seconds / rollouts}
    print(json.dumps(row), flush=True)


def play_verifiers(rollouts: int) -> None:
    """Runs two tasksets of the tests, and prints a row for each."""
    from rllm_verifiers.config import VerifiersConfig
    from rllm_verifiers.workflow import VerifiersWorkflow

    folder = ROOT / "plugins" / "rllm-verifiers" / "tests" / "tasksets"
    for name, taskset in VERIFIERS_TASKSETS.items():
        config = VerifiersConfig(environment=str(folder / f"{taskset}.py"), train_size=8)
        seconds = asyncio.run(_cpu_seconds(VerifiersWorkflow(config), rollouts))
        row = {"kind": "cost", "part": "verifiers", "name": name, "cpu_ms": 1000 * seconds / rollouts}
        print(json.dumps(row), flush=True)


async def _cpu_seconds(workflow: Any, rollouts: int) -> float:
    """Returns the CPU seconds of this process and its children for a number of rollouts, after a warm-up."""
    from rllm_core.engine import TITOCompleter
    from rllm_core.types import SamplingParams
    from rllm_devkit.scripted import ScriptedEngine

    tasks = workflow.tasks("train")
    engine, params = ScriptedEngine(), SamplingParams(max_response_tokens=16)

    async def play(start: int, stop: int) -> None:
        for begin in range(start, stop, AT_A_TIME):
            await asyncio.gather(
                *(
                    workflow.run(tasks[seed % len(tasks)], TITOCompleter(engine, sampling_params=params, seed=seed))
                    for seed in range(begin, min(begin + AT_A_TIME, stop))
                )
            )

    await workflow.open()
    try:
        await play(0, WARM_UP)
        began = time.process_time() + _cpu_seconds_of_children()
        await play(WARM_UP, WARM_UP + rollouts)
        return time.process_time() + _cpu_seconds_of_children() - began
    finally:
        await workflow.close()
        await workflow.services.close()


def _cpu_seconds_of_children() -> float:
    """Returns the CPU seconds of the child processes that run, without those that have ended."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    return {f"{row['part']}_{row['name']}_cpu_ms": round(row["cpu_ms"], 2) for row in of_kind(rows, "cost")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments_cost", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PYTHONS), default=list(PYTHONS))
    parser.add_argument("--rollouts", type=int, default=500, help="rollouts per environment (default 500)")
    parser.add_argument("--play", choices=list(PYTHONS), help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args(given)
    if known.play is not None:
        {"reasoning_gym": play_reasoning_gym, "verifiers": play_verifiers}[known.play](known.rollouts)
    else:
        run("environments_cost", parser, measure, figures, given)


if __name__ == "__main__":
    main()

"""Solve rates and CPU time of the starter model on every seed.

    python -m benchmarks.learning
    python -m benchmarks.learning --workflows sort --seeds 1000 1001

For each seed, a starter model is created from scratch and trained with ``rllm-core train`` in a separate process, with
the workflow's own settings. Figures: ``solved_before_max``, ``solved_after_min`` and ``cpu_seconds_max``; the same for
workflow ``guess`` (``guess_...``), and for ``calculator`` with each parser (``calculator_PARSER_...``). The latter also
have the share of final trajectories with an executed tool call, and the segment breaks of the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.types import Episode

SEEDS = {"sort": range(1000, 1010), "guess": range(1000, 1005), "calculator": range(1000, 1003)}
PARSERS = {"sort": ("chat_template",), "guess": ("chat_template",), "calculator": ("chat_template", "renderer")}
PREFIXES = {
    ("sort", "chat_template"): "",
    ("guess", "chat_template"): "guess_",
    ("calculator", "chat_template"): "calculator_chat_template_",
    ("calculator", "renderer"): "calculator_renderer_",
}
TRAJECTORIES_PER_STEP = 16
FINAL_SHARE = 0.1
"""Final trajectories are those kept from the last validation and from this last share of the training steps."""


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every workflow on every seed."""
    chosen = {name: options.seeds or list(SEEDS[name]) for name in options.workflows}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as executor:
        seeds = sorted({seed for seeds in chosen.values() for seed in seeds})
        wanted = [(seed, [name for name in chosen if seed in chosen[name]], Path(temporary)) for seed in seeds]
        for rows in executor.map(lambda job: train_seed(*job), wanted):
            for row in rows:
                trials.add(row)
                print(json.dumps(row), file=sys.stderr, flush=True)


def train_seed(seed: int, workflows: Sequence[str], folder: Path) -> list[Row]:
    """Creates the seed's starter model, then trains each workflow from it."""
    environment = {**os.environ, **SETTINGS, "RLLM_CACHE_DIR": str(folder / f"cache-{seed}")}
    python = sys.executable
    made = measured([python, "-m", "rllm_local.starter", "--seed", str(seed)], environment)
    rows = [{"kind": "starter", "seed": seed, **made}]
    for workflow, parser in [(name, parser) for name in workflows for parser in PARSERS[name]]:
        run_dir = folder / f"{workflow}-{parser}-{seed}"
        command = [str(Path(python).with_name("rllm-core")), "train", workflow, "--backend", "local"]
        command += ["--parser", parser, "--run-dir", str(run_dir)]
        command += ["-o", f"training.seed={seed}", "-o", f"local.starter_seed={seed}"]
        if workflow == "calculator":
            command += ["-o", f"training.trajectories_per_step={TRAJECTORIES_PER_STEP}"]
        seconds = measured(command, environment)
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        row = {"kind": "training", "workflow": workflow, "parser": parser, "seed": seed, **seconds, **outcome(summary)}
        metrics = read_lines(run_dir / "metrics.jsonl")
        row["segment_breaks"] = sum(step["segment_breaks"] for step in metrics)
        if workflow == "calculator":
            row["tool_call_share"] = tool_call_share(read_lines(run_dir / "trajectories.jsonl"))
        rows.append(row)
    return rows


def read_lines(path: Path) -> list[Row]:
    """Reads the objects of a ``.jsonl`` file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tool_call_share(kept: Sequence[Row]) -> float:
    """Returns the share of final trajectories in which a tool replied to a parsed call.

    Args:
        kept: Lines of ``trajectories.jsonl``.
    """
    final_steps_begin = (1 - FINAL_SHARE) * max(line["step"] for line in kept)
    episodes = [Episode.model_validate(line["episode"]) for line in kept if line["step"] > final_steps_begin]
    return sum(executes_a_call(episode) for episode in episodes) / len(episodes)


def executes_a_call(episode: Episode) -> bool:
    """Returns whether the last prompt contains a tool's number, rather than an error, as the reply to a call."""
    messages = episode.trajectories[0].steps[-1].messages
    called = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    return any(m["role"] == "tool" and m["tool_call_id"] in called and m["content"].isdigit() for m in messages)


def outcome(summary: dict[str, Any]) -> Row:
    """Extracts the learning results from a run's ``summary.json``."""
    validations = summary["validation"]
    before, after = validations[0], validations[-1]
    return {
        "status": summary["status"],
        "optimizer_steps": summary["optimizer_steps"],
        "validation_rollouts": min(before["rollouts"], after["rollouts"]),
        "solved_before": before["solved"],
        "solved_after": after["solved"],
        "reward_before": before["reward_mean"],
        "reward_after": after["reward_mean"],
    }


def measured(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Runs a command; returns wall and CPU seconds, including its children.

    Raises:
        subprocess.CalledProcessError: If it fails; its messages have been printed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"wall_seconds": round(wall, 3), "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3)}


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the worst seeds."""
    found: Figures = {}
    for (workflow, parser), prefix in PREFIXES.items():
        runs = of_kind(rows, "training", workflow=workflow, parser=parser)
        if runs:
            found[f"{prefix}solved_before_max"] = round(max(row["solved_before"] for row in runs), 4)
            found[f"{prefix}solved_after_min"] = round(min(row["solved_after"] for row in runs), 4)
            found[f"{prefix}cpu_seconds_max"] = max(row["cpu_seconds"] for row in runs)
            found[f"{prefix}seeds"] = len(runs)
            if workflow == "calculator":
                found[f"{prefix}tool_call_share_min"] = round(min(row["tool_call_share"] for row in runs), 4)
                found[f"{prefix}segment_breaks"] = sum(row["segment_breaks"] for row in runs)
    starters = of_kind(rows, "starter")
    if starters:
        found["starter_cpu_seconds_max"] = max(row["cpu_seconds"] for row in starters)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--workflows", nargs="+", choices=list(SEEDS), default=list(SEEDS))
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        metavar="SEED",
        help="seeds (default: ten for sort, five for guess, three for calculator)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel seeds (default 2; 1 gives lower CPU seconds)")
    run("learning", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

"""Solve rates and CPU time of the starter model on every seed.

    python -m benchmarks.learning
    python -m benchmarks.learning --workflows sort --seeds 1000 1001

For each seed, a starter model is created from scratch and trained with ``rllm-core train`` in a separate process, with
the workflow's own settings. Figures: ``solved_before_max``, ``solved_after_min`` and ``cpu_seconds_max``; the same for
workflow ``guess`` (``guess_...``), and for ``calculator`` with each parser (``calculator_PARSER_...``). The latter also
have the share of final trajectories with an executed tool call, and the segment breaks of the whole run.

``--workflows agent`` trains, for each seed, the agents in ``benchmarks/agents`` through the gateway, and beside them
the native workflows ``guess`` and ``calculator``: from the same model, with the same settings, tasks and steps. The
agents' rewards are the same, but of a whole rollout rather than of its turns. Figures: ``agent_guess_gap_max`` and
``agent_calculator_gap_max``, the largest difference between the native solved share and the agent's over the seeds
(goal: at most 0.02), and the worst of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rllm_workflows import calculator, guess

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.types import Episode
from rllm_core.workflow import Workflow

SEEDS = {
    "sort": range(1000, 1010),
    "guess": range(1000, 1005),
    "calculator": range(1000, 1003),
    "agent": range(1000, 1003),
}
PARSERS = {"sort": ("chat_template",), "guess": ("chat_template",), "calculator": ("chat_template", "renderer")}
PREFIXES = {
    ("sort", "chat_template"): "",
    ("guess", "chat_template"): "guess_",
    ("calculator", "chat_template"): "calculator_chat_template_",
    ("calculator", "renderer"): "calculator_renderer_",
}
TRAJECTORIES_PER_STEP = 16
AGENT_VALIDATION_ROLLOUTS = 2048
"""Enough rollouts that chance causes less than 0.01 of a gap."""
GAMES: dict[str, tuple[type[Workflow], Callable[[], dict[str, Any]], float]] = {
    "guess": (guess.GuessWorkflow, guess.run_file, 1.0),
    "calculator": (calculator.CalculatorWorkflow, calculator.run_file, 1.999),
}
"""Workflow of each game, its settings, and the sum of rewards, within rounding, at which it counts a task as solved."""
FINAL_SHARE = 0.1
"""Final trajectories are those kept from the last validation and from this last share of the training steps."""


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains every workflow on every seed."""
    chosen = {name: options.seeds or list(SEEDS[name]) for name in options.workflows}
    adding = threading.Lock()

    def train(seed: int, folder: Path) -> None:
        for row in train_seed(seed, [name for name in chosen if seed in chosen[name]], folder):
            with adding:
                trials.add(row)
                print(json.dumps(row), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as executor:
        seeds = sorted({seed for seeds in chosen.values() for seed in seeds})
        for done in [executor.submit(train, seed, Path(temporary)) for seed in seeds]:
            done.result()


def train_seed(seed: int, workflows: Sequence[str], folder: Path) -> Iterator[Row]:
    """Creates the seed's starter model, then trains each workflow from it."""
    environment = {**os.environ, **SETTINGS, "RLLM_CACHE_DIR": str(folder / f"cache-{seed}")}
    made = measured([sys.executable, "-m", "rllm_local.starter", "--seed", str(seed)], environment)
    yield {"kind": "starter", "seed": seed, **made}
    for workflow in workflows:
        if workflow == "agent":
            yield from agent_rows(seed, folder, environment)
            continue
        for parser in PARSERS[workflow]:
            run_dir = folder / f"{workflow}-{parser}-{seed}"
            more = [f"training.trajectories_per_step={TRAJECTORIES_PER_STEP}"] if workflow == "calculator" else []
            row = trained([workflow, "--parser", parser], seed, run_dir, environment, more)
            row = {"kind": "training", "workflow": workflow, "parser": parser, "seed": seed, **row}
            if workflow == "calculator":
                row["tool_call_share"] = tool_call_share(read_lines(run_dir / "trajectories.jsonl"))
            yield row


def trained(
    what: Sequence[str], seed: int, run_dir: Path, environment: Mapping[str, str], overrides: Sequence[str] = ()
) -> Row:
    """Trains from the starter model of a seed, and returns what it cost and the results."""
    command = [str(Path(sys.executable).with_name("rllm-core")), "train", *what, "--backend", "local"]
    command += ["--run-dir", str(run_dir)]
    for override in (f"training.seed={seed}", f"local.starter_seed={seed}", *overrides):
        command += ["-o", override]
    seconds = measured(command, environment)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    metrics = read_lines(run_dir / "metrics.jsonl")
    return {**seconds, **outcome(summary), "segment_breaks": sum(step["segment_breaks"] for step in metrics)}


# --------------------------------------------------------------------------------------------------------------------
# Agents


def agent_rows(seed: int, folder: Path, environment: Mapping[str, str]) -> Iterator[Row]:
    """Trains each game natively, and as an agent through the gateway."""
    validation = [f"training.validation_rollouts={AGENT_VALIDATION_ROLLOUTS}"]
    for game in GAMES:
        run_file = write_run_file(game, folder)
        for side, what in (("native", game), ("agent", str(run_file))):
            run_dir = folder / f"{side}-{game}-{seed}"
            row = trained([what], seed, run_dir, environment, validation)
            row = {"kind": "agent", "game": game, "side": side, "seed": seed, **row}
            if side == "agent":
                row |= of_gateway(read_lines(run_dir / "metrics.jsonl"))
            yield row


def of_gateway(metrics: Sequence[Mapping[str, float]]) -> Row:
    """Returns the gateway's means over the steps of a run: calls, roots and rewritten answers per rollout."""
    names = sorted({name for step in metrics for name in step if "gateway_" in name})
    return {name: sum(step.get(name, 0.0) for step in metrics) / len(metrics) for name in names}


def write_run_file(game: str, folder: Path, *, agent: str = "", **more: Any) -> Path:
    """Writes the rows and the run file with which an agent plays a native workflow's game; returns the latter.

    Args:
        game: Name of the native workflow.
        folder: Where to write.
        agent: Name of the agent and of its reward. Defaults to that of the game.
        more: Other settings of workflow ``agent``.
    """
    native, preset, solved_at = GAMES[game]
    agents = ROOT / "benchmarks" / "agents"
    rows = {"train": folder / f"{game}-train.jsonl", "validation": folder / f"{game}-validation.jsonl"}
    about = {
        "function": f"{agents / (agent or game)}.py:play",
        "reward": f"{agents / 'rewards'}.py:of_{agent or game}",
        "solved_at": solved_at,
        **more,
    }
    for split, path in rows.items():
        lines = [json.dumps({"id": task.task_id, **row_of(game, task.data)}) for task in native().tasks(split)]
        path.write_text("\n".join(lines), encoding="utf-8")
        about[f"{split}_file"] = str(path)
    settings = {name: section for name, section in preset().items() if name != game} | {"agent": about}
    run_file = folder / f"{game}.toml"
    run_file.write_text("\n".join(['workflow = "agent"', *toml(settings)]), encoding="utf-8")
    return run_file


def row_of(game: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a task: of ``guess``, the secret; of ``calculator``, the question and its solution."""
    if game == "guess":
        return dict(data)
    [word] = [word for word, tool in calculator.TOOLS.items() if tool == data["tool"]]
    return {"question": calculator.prompt(data["a"], word, data["b"]), **data}


def toml(sections: Mapping[str, Mapping[str, Any]], under: str = "") -> Iterator[str]:
    """Yields the lines of a run file; its values are those that JSON and TOML write alike."""
    for name, section in sections.items():
        plain = {key: value for key, value in section.items() if not isinstance(value, Mapping)}
        yield f"[{under}{name}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in plain.items())
        tables = {key: value for key, value in section.items() if key not in plain}
        yield from toml(tables, f"{under}{name}.")


# --------------------------------------------------------------------------------------------------------------------
# Results


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
    for game in GAMES:
        found |= _agent_figures(game, of_kind(rows, "agent", game=game))
    starters = of_kind(rows, "starter")
    if starters:
        found["starter_cpu_seconds_max"] = max(row["cpu_seconds"] for row in starters)
    return found


def _agent_figures(game: str, runs: Sequence[Row]) -> Figures:
    """Compares the agent with the native workflow, seed by seed."""
    solved = {(row["side"], row["seed"]): row["solved_after"] for row in runs}
    seeds = sorted(seed for side, seed in solved if side == "agent" and ("native", seed) in solved)
    if not seeds:
        return {}
    found = {f"agent_{game}_gap_max": round(max(solved["native", seed] - solved["agent", seed] for seed in seeds), 4)}
    for side, prefix in (("agent", f"agent_{game}"), ("native", f"agent_{game}_native")):
        own = of_kind(runs, "agent", side=side)
        found[f"{prefix}_solved_after_min"] = round(min(row["solved_after"] for row in own), 4)
        found[f"{prefix}_cpu_seconds_max"] = max(row["cpu_seconds"] for row in own)
        found[f"{prefix}_segment_breaks"] = sum(row["segment_breaks"] for row in own)
    return found | {f"agent_{game}_seeds": len(seeds)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--workflows", nargs="+", choices=list(SEEDS), default=list(PARSERS))
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        metavar="SEED",
        help="seeds (default: ten for sort, five for guess, three for calculator and agent)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel seeds (default 2; 1 gives lower CPU seconds)")
    run("learning", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

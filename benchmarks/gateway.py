"""Whether the gateway attributes every token to its rollout, and the cost of its calls.

    python -m benchmarks.gateway
    python -m benchmarks.gateway --parts tokens memory

Every trial runs in its own process, with a scripted engine. Within a process, sides alternate.

* ``tokens``: 512 concurrent agents make 5,000 calls or more, which are answered in random order; see
  `benchmarks.gateway_trace` for their conversations. A referee knows only the engine's requests and completions and the
  answers to clients. It counts ``misattributed_tokens``, ``tokens_trained_twice`` and ``tokens_uncounted`` (goals: 0;
  see `benchmarks.gateway_referee`). ``..._by_position``: the same agents, with calls matched by the number of turns.
* ``call``: five turns of 200 characters per side. ``cpu_ms_per_call`` (at most 0.3): the handler without HTTP,
  including its completer, parser and engine. ``native_cpu_ms_per_call``: these alone. ``http_cpu_ms_per_call`` (at most
  1): with server and a bare client in this process.
* ``length``: ``turn200_over_turn5`` (at most 1.3): the cost of the handler, minus that of the completer alone, for a
  late turn of a conversation divided by that for an early one. 400 characters per message; means over seven turns and
  eight rollouts. The two times are ``turn5_us`` and ``turn200_us``.
* ``memory``: ``bytes_over_distinct`` (at most 1.2): the bytes of all numpy buffers of open rollouts, divided by those
  of their distinct tokens and log-probabilities, after 40 turns with branches, alternatives and sub-agents.
  ``straight_bytes_over_distinct``: without these.
* ``crowd``: ``lost_calls`` (0) of 4,096 concurrent calls of another process, over as many connections. All of them wait
  in the engine before the first is answered.
* ``step``: ``agent_step_over_native`` (at most 2): the seconds of a training step of an openai-agents calculator, in
  worker processes, divided by those of the native workflow, with backend ``local``; ``..._cpu``: the same for the CPU
  times of all processes. Uses the environment ``.venv-agents``, which it creates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

PARTS = ("tokens", "call", "length", "memory", "crowd", "step")
AGENTS_PYTHON = ROOT / ".venv-agents" / "bin" / "python"
COUNTED = ("misattributed_tokens", "tokens_trained_twice", "tokens_uncounted")
EARLY_TURN, LATE_TURN = 5, 200


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts."""
    for part in options.parts:
        python = sys.executable
        if part == "step":
            subprocess.run(["make", ".venv-agents/.installed"], check=True, cwd=ROOT, stdout=sys.stderr)
            python = str(AGENTS_PYTHON)
        for request in requests(part, options):
            for row in play(python, request):
                trials.add(row)
                print(json.dumps(row), file=sys.stderr, flush=True)


def requests(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the trials of a part. See `benchmarks.gateway_trial`."""
    match part:
        case "tokens":
            yield {"part": part, "rollouts": options.rollouts, "seed": options.seed}
        case "call":
            yield {"part": part, "rollouts": 200, "turns": 5, "characters": 200, "trials": options.trials}
        case "length":
            yield {"part": part, "at": [EARLY_TURN, LATE_TURN], "characters": 400, "trials": options.trials}
        case "memory":
            for branches in (False, True):
                yield {"part": part, "rollouts": 16, "turns": 40, "characters": 400, "branches": branches}
        case "crowd":
            yield {"part": part, "rollouts": 512, "calls": options.calls, "seconds": 120}
        case _:
            yield {"part": part, "trials": options.step_trials, "steps": 3, "workers": 2}


def play(python: str, request: Row) -> Iterator[Row]:
    """Runs a trial in its own process, and yields its rows.

    Raises:
        RuntimeError: If it fails.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    command = [python, "-m", "benchmarks.gateway_trial", json.dumps(request)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as playing:
        assert playing.stdout is not None
        for line in playing.stdout:
            yield json.loads(line)
    if playing.returncode:
        raise RuntimeError(f"the trial {request['part']} failed with exit code {playing.returncode}")


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the measured parts; times are medians over the trials."""
    computed: dict[str, Callable[[Sequence[Row]], Figures]] = {
        "tokens": _tokens,
        "call": _call,
        "length": _length,
        "memory": _memory,
        "crowd": _crowd,
        "step": _step,
    }
    found: Figures = {}
    for part, compute in computed.items():
        if own := of_kind(rows, part):
            found |= compute(own)
    return found


def _tokens(rows: Sequence[Row]) -> Figures:
    found: Figures = {}
    for way, ending in (("gateway", ""), ("position", "_by_position")):
        own = of_kind(rows, "tokens", way=way)
        found |= {f"{name}{ending}": sum(row[name] for row in own) for name in (*COUNTED, "calls")}
    return found


def _call(rows: Sequence[Row]) -> Figures:
    sides = ("native", "handler", "http")
    seconds = {side: [row["cpu_seconds"] for row in of_kind(rows, "call", side=side)] for side in sides}
    calls = rows[0]["calls"]

    def ms(side: str) -> float:
        return round(1e3 * statistics.median(seconds[side]) / calls, 4)

    return {
        "cpu_ms_per_call": ms("handler"),
        "native_cpu_ms_per_call": ms("native"),
        "cpu_over_native": round(paired_ratio(zip(seconds["native"], seconds["handler"], strict=True)), 2),
        "http_cpu_ms_per_call": ms("http"),
        "http_cpu_over_native": round(paired_ratio(zip(seconds["native"], seconds["http"], strict=True)), 2),
    }


def _length(rows: Sequence[Row]) -> Figures:
    us = {(row["side"], row["turn"], row["trial"]): row["cpu_us"] for row in rows}
    trials = sorted({row["trial"] for row in rows})
    # Medians first: the difference of one pair is small beside its noise.
    early, late = (
        statistics.median(us["handler", turn, trial] - us["native", turn, trial] for trial in trials)
        for turn in (EARLY_TURN, LATE_TURN)
    )
    return {
        "turn200_over_turn5": round(late / early, 2),
        "turn5_us": round(early, 1),
        "turn200_us": round(late, 1),
        "native_turn200_us": round(statistics.median(us["native", LATE_TURN, trial] for trial in trials), 1),
    }


def _memory(rows: Sequence[Row]) -> Figures:
    names = {True: "bytes_over_distinct", False: "straight_bytes_over_distinct"}
    return {names[row["branches"]]: round(row["array_bytes"] / row["distinct_bytes"], 3) for row in rows}


def _crowd(rows: Sequence[Row]) -> Figures:
    [row] = rows
    return {
        "lost_calls": row["calls"] - min(row["own_answers"], row["right_steps"]),
        "surplus_steps": row["steps"] - row["right_steps"],
        "simultaneous_calls": row["simultaneous"],
        "crowd_server_cpu_ms_per_call": round(1e3 * row["server_cpu_seconds"] / row["calls"], 3),
    }


def _step(rows: Sequence[Row]) -> Figures:
    found: Figures = {}
    for what, ending in (("step_seconds", ""), ("step_cpu_seconds", "_cpu")):
        of = {(row["side"], row["trial"]): row[what] for row in rows}
        both = [
            trial for side, trial in of if side == "native" and ("agent", trial) in of
        ]  # an interrupted run has more
        pairs = [(of["native", trial], of["agent", trial]) for trial in both]
        found[f"agent_step_over_native{ending}"] = round(paired_ratio(pairs), 2)
        for side, values in zip(("native", "agent"), zip(*pairs, strict=True), strict=True):
            found[f"{side}_{what}"] = round(statistics.median(values), 3)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--trials", type=int, default=9, help="trials of a time")
    parser.add_argument("--step-trials", type=int, default=3, help="pairs of training runs")
    parser.add_argument("--rollouts", type=int, default=512, help="concurrent agents of part tokens")
    parser.add_argument("--calls", type=int, default=4096, help="simultaneous calls of part crowd")
    parser.add_argument("--seed", type=int, default=0, help="what the agents of part tokens do")
    run("gateway", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

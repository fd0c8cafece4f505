"""Costs and gains of running rollouts in other processes.

    python -m benchmarks.hosts

Every trial is a process of its own, which runs rollouts of `benchmarks.hosted_talk` with `RolloutRunner` in the host
under test. The engine is scripted and answers at once; both sides write 200 characters per turn. Trials of the host and
of `inline` alternate.

* ``speed``: 64 concurrent rollouts that compute for 20 ms per turn, in two workers: ``speedup_two_workers`` (goal: at
  least 1.8), ``wall_over_ideal`` (at most 1.1), where the ideal is half the CPU time of the turns. With ``_cpu``: the
  same, with the wall time that the CPU times allow on two idle cores.
* ``driver``: no computation: ``driver_us_per_turn_over_inline_us`` (at most 35), the CPU time of the run's process per
  turn minus that of an inline run, as the slope between short and long rollouts. Also ``start_seconds_per_worker`` (at
  most 1, CPU time until the workflow is open) and ``worker_mb`` (at most 80, resident memory after the rollouts,
  including pages that are shared; ``_uss`` is what belongs to one worker alone, ``_pss`` adds its share of the others).
* ``length``: ``turn100_over_turn5`` (at most 1.2), the largest of the ratios of bytes, of CPU time, and of that of the
  workers alone. All rollouts take their turns together, so CPU times can be read between two turns. Those of the run's
  process and of all workers count, minus those of an inline run; a small difference, which needs a quiet machine.
* ``lag``: ``lag_p99_ms`` (at most 50), the lag of the run's event loop with 2,000 rollouts in four workers, which
  compute for 2 ms per turn.

With Ray, on one machine as two nodes: the same figures with ``ray_`` before their names (``ray_speedup_two_workers`` at
least 1.6, ``ray_lag_p99_ms`` at most 50), and ``ray_calls_per_frame``, which is 1 if all messages of one tick are sent
in one call. Creates the environment ``.venv-verl`` for them on first use; ``--no-ray`` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.peer_environments import ROOT, SETTINGS
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run

PARTS = ("speed", "driver", "length", "lag")
RAY_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
CORES = 2
WORKERS = 2
SHORT_TURNS, LONG_TURNS = 2, 22
EARLY_TURN, LATE_TURN = 5, 100
TURNS_AROUND = 3
"""Turns before and after a turn, over which its cost is averaged."""


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts in host ``processes``, then in host ``ray``."""
    for part, number in product(options.parts, range(options.trials)):
        for row in trial(part, number, "processes", options):
            trials.add(row)
    if options.ray:
        subprocess.run(["make", ".venv-verl/.installed"], check=True, cwd=ROOT, stdout=sys.stderr)
        command = [RAY_PYTHON, "-m", "benchmarks.hosts_ray", json.dumps(vars(options))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as playing:
            assert playing.stdout is not None
            for line in playing.stdout:
                trials.add(json.loads(line))
        if playing.returncode:
            raise RuntimeError(f"the trials in host ray failed with exit code {playing.returncode}")


def trial(part: str, number: int, host: str, options: argparse.Namespace) -> Iterator[Row]:
    """Runs one trial of a part, in the host and inline, and yields their rows."""
    for request in requests(part, number, host, options):
        row = {**play(request), "part": part, "trial": number, "beside": host}
        shown = ("host", "turns", "wall_seconds", "driver_cpu_seconds", "worker_cpu_seconds", "lag_p99_ms")
        print(part, number, json.dumps({key: row[key] for key in shown if key in row}), file=sys.stderr, flush=True)
        yield row


def requests(part: str, number: int, host: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the trials of one round of a part; every second round in reverse order. See `hosts_trial.play`."""
    hosts = ("inline", host)[:: 1 if number % 2 == 0 else -1]
    plain = {"workers": WORKERS, "concurrent": 64, "work_seconds": 0.0, "together": False, "beats": False}
    match part:
        case "speed":
            for name in hosts:
                yield {**plain, "host": name, "rollouts": 64, "turns": options.turns, "work_seconds": 0.02}
        case "driver":
            for turns, name in product((SHORT_TURNS, LONG_TURNS), hosts):
                yield {**plain, "host": name, "rollouts": options.rollouts, "turns": turns}
        case "length":
            for name in hosts:
                yield {**plain, "host": name, "rollouts": 64, "turns": LATE_TURN + TURNS_AROUND + 1, "together": True}
        case _:
            many = {**plain, "workers": 4, "rollouts": options.lag_rollouts, "concurrent": options.lag_rollouts}
            yield {**many, "host": host, "turns": options.lag_turns, "work_seconds": 0.002, "beats": True}


def play(request: Row) -> Row:
    """Runs a trial in its own process."""
    command = [sys.executable, "-m", "benchmarks.hosts_trial", json.dumps(request)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def environment() -> dict[str, str]:
    """Returns the environment variables of a trial, which its workers inherit: they import the workflow from here."""
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the measured parts, each the median over the trials."""
    found: Figures = {}
    for host, prefix in (("processes", ""), ("ray", "ray_")):
        of_host: Figures = {}
        for part, compute in (("speed", _speed), ("driver", _driver), ("length", _length), ("lag", _lag)):
            mine, inline = ([*of_kind(rows, "trial", part=part, beside=host, host=name)] for name in (host, "inline"))
            if mine:
                of_host |= compute(mine, inline)
        found |= {f"{prefix}{name}": value for name, value in of_host.items()}
    return found


def _speed(mine: Sequence[Row], inline: Sequence[Row]) -> Figures:
    ideals = [row["rollouts"] * row["turns"] * row["work_seconds"] / CORES for row in mine]
    pairs = list(zip(inline, mine, strict=True))
    return {
        "speedup_two_workers": _median(one["wall_seconds"] / other["wall_seconds"] for one, other in pairs),
        "speedup_two_workers_cpu": _median(_idle_wall(one) / _idle_wall(other) for one, other in pairs),
        "wall_over_ideal": _median(row["wall_seconds"] / ideal for row, ideal in zip(mine, ideals, strict=True)),
        "wall_over_ideal_cpu": _median(_idle_wall(row) / ideal for row, ideal in zip(mine, ideals, strict=True)),
    }


def _idle_wall(row: Row) -> float:
    """Returns the wall seconds that a trial's CPU times need at least on idle cores."""
    workers: list[float] = row["worker_cpu_seconds"]
    every = [row["driver_cpu_seconds"], *workers]
    return max(*every, sum(every) / CORES)


def _driver(mine: Sequence[Row], inline: Sequence[Row]) -> Figures:
    ours, theirs = _slopes(mine), _slopes(inline)
    long = of_kind(mine, "trial", turns=LONG_TURNS)
    is_ray = long[0]["host"] == "ray"
    memory = {
        kind: max(_median(w[kind] for w in row["worker_memory_mb"]) for row in long)
        for kind in long[0]["worker_memory_mb"][0]
    }
    return {
        "driver_us_per_turn_over_inline_us": _median(ours[trial][0] - theirs[trial][0] for trial in ours),
        "driver_us_per_turn": _median(turn for turn, _ in ours.values()),
        "inline_us_per_turn": _median(turn for turn, _ in theirs.values()),
        "driver_us_per_rollout_over_inline_us": _median(ours[trial][1] - theirs[trial][1] for trial in ours),
        "messages_per_frame": _median(row["messages_sent"] / row["frames_sent"] for row in long),
        **({"calls_per_frame": _median(row["ray_calls"] / row["frames_sent"] for row in long)} if is_ray else {}),
        "start_seconds_per_worker": _median(_start_seconds(row) for row in mine),
        "worker_mb": memory["rss"],
        "worker_mb_pss": memory["pss"],
        "worker_mb_uss": memory["uss"],
    }


def _start_seconds(row: Row) -> float:
    workers = row["start_worker_cpu_seconds"]
    return float((row["start_driver_cpu_seconds"] + sum(workers)) / len(workers))


def _slopes(rows: Sequence[Row]) -> dict[int, tuple[float, float]]:
    """Returns microseconds of the run's process per turn and per rollout without turns, by trial."""
    seconds = {(row["trial"], row["turns"]): row["driver_cpu_seconds"] / row["rollouts"] for row in rows}
    found = {}
    for trial in sorted({row["trial"] for row in rows}):
        short, long = seconds[trial, SHORT_TURNS], seconds[trial, LONG_TURNS]
        turn = (long - short) / (LONG_TURNS - SHORT_TURNS)
        found[trial] = 1e6 * turn, 1e6 * (short - SHORT_TURNS * turn)
    return found


def _length(mine: Sequence[Row], inline: Sequence[Row]) -> Figures:
    early, late = ([_cost(row, turn) for row in mine] for turn in (EARLY_TURN, LATE_TURN))
    alone = {turn: [_cost(row, turn) for row in inline] for turn in (EARLY_TURN, LATE_TURN)}
    bytes_ratio = _median(b["bytes"] / a["bytes"] for a, b in zip(early, late, strict=True))
    # Medians first: the difference of one pair is small beside its noise.
    added = [
        _median(one["us"] - other["us"] for one, other in zip(costs, alone[turn], strict=True))
        for turn, costs in ((EARLY_TURN, early), (LATE_TURN, late))
    ]
    cpu_ratio = round(added[1] / added[0], 3)
    workers_ratio = _median(b["workers_us"] / a["workers_us"] for a, b in zip(early, late, strict=True))
    return {
        "turn100_over_turn5": max(bytes_ratio, cpu_ratio, workers_ratio),
        "turn100_over_turn5_bytes": bytes_ratio,
        "turn100_over_turn5_cpu": cpu_ratio,
        "turn100_over_turn5_workers_cpu": workers_ratio,
        "turn5_bytes": _median(cost["bytes"] for cost in early),
        "turn5_us_over_inline_us": added[0],
        "turn100_us_over_inline_us": added[1],
    }


def _cost(row: Row, turn: int) -> dict[str, float]:
    """Returns the mean bytes and microseconds of CPU time, of all processes, of the turns around one."""
    begins = {entry["turn"]: entry for entry in row["by_turn"]}
    before, after = begins[turn - TURNS_AROUND], begins[turn + TURNS_AROUND + 1]
    turns = row["rollouts"] * (2 * TURNS_AROUND + 1)

    def in_workers(entry: dict[str, Any]) -> float:
        return float(sum(entry["worker_cpu_seconds"]))

    def crossed(entry: dict[str, Any]) -> int:
        return int(entry["bytes_sent"] + entry["bytes_received"])

    in_run = after["driver_cpu_seconds"] - before["driver_cpu_seconds"]
    of_workers = in_workers(after) - in_workers(before)
    return {
        "bytes": (crossed(after) - crossed(before)) / turns,
        "us": 1e6 * (in_run + of_workers) / turns,
        "workers_us": 1e6 * of_workers / turns,
    }


def _lag(mine: Sequence[Row], inline: Sequence[Row]) -> Figures:
    return {
        "lag_p99_ms": _median(row["lag_p99_ms"] for row in mine),
        "lag_p99_ms_cpu": _median(row["lag_p99_alone_ms"] for row in mine),
        "lag_max_ms": _median(row["lag_max_ms"] for row in mine),
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--trials", type=int, default=7, help="trials per part")
    parser.add_argument("--turns", type=int, default=5, help="turns of the rollouts that compute")
    parser.add_argument("--rollouts", type=int, default=200, help="rollouts to measure the run's process with")
    parser.add_argument("--lag-rollouts", type=int, default=2000, help="concurrent rollouts to measure the lag with")
    parser.add_argument("--lag-turns", type=int, default=5, help="their turns")
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="leave out host ray")
    run("hosts", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()

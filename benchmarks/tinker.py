"""Speed of backend ``tinker`` relative to tinker-cookbook's own RL loop, and to the minimum a step needs.

    python -m benchmarks.tinker

One Tinker server on this machine (SkyRL's, on the CPU), one model, one task and one group size. Three processes take
turns at every step, so that other load affects all equally: ours, the unmodified cookbook loop, and a loop with the
bare SDK and one request per group. Server and clients share one core, so that no loop wins by using more cores. Each
step records seconds; CPU seconds of the client, the server's API and its engine; and HTTP requests seen by the server.
Goals: ``steps_per_second_over_cookbook`` at least 2.5, ``seconds_per_step_over_floor`` at most 1.15.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peer_environments import ROOT
from benchmarks.peer_environments import SETTINGS as ENVIRONMENT
from benchmarks.sides import Side
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run

if TYPE_CHECKING:
    from server import TinkerServer

CLIENT, SERVER = ROOT / ".venv-tinker-cookbook", ROOT / ".venv-tinker-server"
SIDES = ("ours", "cookbook", "floor")
WARM_UP_STEPS = 3
"""Steps in which the server compiles, separately for each model."""
ENGINE = {"max_lora_adapters": 6, "max_lora_rank": 8, "train_micro_batch_size": 64, "sample_max_num_sequences": 128}
"""Sizes with which a step fits into a few batches, without compiling again."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def enter_environment(arguments: Sequence[str]) -> None:
    """Restarts in the environment with the cookbook and ours; creates it and the server's if needed."""
    os.environ.update(ENVIRONMENT | {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-none", "TQDM_DISABLE": "1"})
    if Path(sys.prefix).resolve() == CLIENT.resolve():
        return
    subprocess.run(
        ["make", f"{CLIENT.name}/.installed", f"{SERVER.name}/.installed"], check=True, cwd=ROOT, stdout=sys.stderr
    )
    os.chdir(ROOT)
    python = CLIENT / "bin" / "python"
    os.execv(python, [str(python), "-m", "benchmarks.tinker", *arguments])


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Lets the three sides take turns; the order changes with every step."""
    sys.path.insert(0, str(ROOT / "tests" / "tinker"))
    from server import TinkerServer, starter_model

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # inherited by all processes started from here
    cache = SERVER / "cache"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_sides:
        server = TinkerServer(Path(folder) / "server", starter_model(cache), cache, engine=ENGINE)
        server.start()
        open_sides.callback(server.stop)
        sides = [open_sides.enter_context(Side(name, "benchmarks.tinker_sides")) for name in SIDES]
        steps = WARM_UP_STEPS + options.steps
        for side in sides:
            # One step more than is timed, which the cookbook's loop ends with a save.
            side.begin(
                {
                    "side": side.name,
                    "model": str(server.model),
                    "base_url": server.base_url,
                    "steps": steps + 1,
                    "seed": options.seed,
                }
            )
        for step in range(steps):
            for side in [*sides[step % 3 :], *sides[: step % 3]]:
                row = {"kind": "step", "side": side.name, "warm_up": step < WARM_UP_STEPS, **_timed(side, server)}
                trials.add(row)
                print(
                    f"{row['side']:>8} step {row['step']}: {row['wall_seconds']:.3f} s, {row['requests']} requests",
                    file=sys.stderr,
                    flush=True,
                )


def _timed(side: Side, server: TinkerServer) -> Row:
    requests, cpu, load = server.request_count(), _cpu_seconds(server.pids), os.getloadavg()[0]
    row = side.step()
    api, engine = (after - before for before, after in zip(cpu, _cpu_seconds(server.pids), strict=True))
    paths: Counter[str] = server.requests(requests)
    return {
        **row,
        "api_cpu_seconds": api,
        "engine_cpu_seconds": engine,
        "requests": paths.total(),
        "paths": dict(paths),
        "load_average": load,
    }


def _cpu_seconds(pids: Sequence[int]) -> list[float]:
    seconds = []
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        seconds.append((int(fields[11]) + int(fields[12])) / CLOCK_TICKS)
    return seconds


def figures(rows: Sequence[Row]) -> Figures:
    """Computes ratios of adjacent steps, medians per step and side, and mean requests."""
    timed = {name: of_kind(rows, "step", side=name, warm_up=False) for name in SIDES}
    found: Figures = {"steps": len(timed["ours"])}
    for ending, seconds_of in (("", _seconds), ("_cpu", _all_cpu_seconds)):
        ours, cookbook, floor = ([seconds_of(row) for row in timed[name]] for name in SIDES)
        found |= {
            f"steps_per_second_over_cookbook{ending}": round(paired_ratio(zip(ours, cookbook, strict=True)), 3),
            f"steps_per_second_over_cookbook_total{ending}": round(sum(cookbook) / sum(ours), 3),
            f"seconds_per_step_over_floor{ending}": round(paired_ratio(zip(floor, ours, strict=True)), 3),
            f"seconds_per_step_over_floor_total{ending}": round(sum(ours) / sum(floor), 3),
        }
    for name in SIDES:
        found[f"{name}_seconds"] = round(statistics.median(map(_seconds, timed[name])), 3)
        for process, key in (("client", "cpu_seconds"), ("api", "api_cpu_seconds"), ("engine", "engine_cpu_seconds")):
            found[f"{name}_{process}_cpu_seconds"] = round(statistics.median(row[key] for row in timed[name]), 3)
        found[f"{name}_requests"] = round(statistics.fmean(row["requests"] for row in timed[name]), 1)
    loads = [row["load_average"] for name in SIDES for row in timed[name]]
    return found | {"load_average_mean": round(statistics.fmean(loads), 1)}


def _seconds(row: Row) -> float:
    return float(row["wall_seconds"])


def _all_cpu_seconds(row: Row) -> float:
    return float(row["cpu_seconds"] + row["api_cpu_seconds"] + row["engine_cpu_seconds"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=28, help="timed steps per side; 25 include one recovery state of ours"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--from-raw" not in " ".join(given) and not {"-h", "--help"} & set(given):
        enter_environment(given)
    run("tinker", parser, measure, figures, given)


if __name__ == "__main__":
    main()

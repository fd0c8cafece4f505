"""Speed of backend ``verl`` relative to verl's own ``main_ppo``, and of asynchrony with a workflow that waits.

    python -m benchmarks.verl

``sort`` and ``endless``: both sides train colocated on one Ray cluster on this machine's CPU and take turns at every
step, in alternating order. A step lasts from the start of a side's turn until it waits for the next: generation,
rewards, log-probabilities, update, weight sync, metrics and logging. The figures count CPU time, user and system, of
all processes of the side (driver, actors, trainer, vLLM) and of Ray's daemons, which serve the side whose turn it is.
With ``sort``, the starter task, a step has 256 short answers, so most of the time is spent around the model. With
``endless`` (``..._long``), it has 64 completions of exactly 256 tokens, so most of the time is spent in the model.
Goal: ``seconds_per_step_over_main_ppo`` at most 1.05, never above 1.15.

``async``: ours alone, on a workflow with two turns that waits 2 s after each: synchronous colocated, synchronous
separated, and asynchronous separated (one batch ahead, completions resumed across weight syncs). ``async_over_sync`` is
the wall time per step of the last mode divided by that of the *faster* synchronous one; ``..._colocated`` and
``..._separated`` compare with each. Goal: below 1.

``--lora``: the same two workloads with adapters of rank 8, on both sides (``lora_...``). A third side is ours without
the checks after weight syncs, except for the first. ``canary_share`` is the share of a step's CPU time that the
checks take: the CPU time that all processes of the side use while a check runs, divided by that of the steps. It
includes the time that vLLM's processes wait in a loop. ``canary_share_paired`` is one minus the sum of the unchecked
steps divided by that of the checked ones; it moves by a percent between runs of the same code. Both are sums over all
steps, because most checks cost little and every eighth much: give ``--steps`` a multiple of 8. Goals:
``lora_seconds_per_step_over_main_ppo`` at most 1.05, ``canary_share`` at most 0.01.

Creates the environment ``.venv-verl`` on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peer_environments import ROOT
from benchmarks.peer_environments import SETTINGS as ENVIRONMENT
from benchmarks.sides import Side
from benchmarks.trials import Figures, RawTrials, Row, of_kind, paired_ratio, run
from benchmarks.verl_processes import CLUSTER, SIDE_VARIABLE, cpu_seconds, spent

HERE = ROOT / ".venv-verl"
SUPPORT = ROOT / "tests" / "verl" / "support"
FIGURE_SUFFIXES = {"sort": "", "endless": "_long"}
"""Suffix of the figures of each workload."""
PARTS = (*FIGURE_SUFFIXES, "async")
SIDES = ("ours", "main_ppo")
UNCHECKED = "unchecked"
FIRST_SYNC_ONLY = 10**9
"""``verl.sync_check_every`` of the side that only checks its first weight sync."""
LORA_RANK = 8
WARM_UP_STEPS = 3
FILLING_STEPS = 3
"""First steps of a run, in which the pipeline fills."""
MODES = ("synchronous_colocated", "synchronous_separated", "asynchronous_separated")


def enter_environment(arguments: Sequence[str]) -> None:
    """Restarts in the environment with verl for the CPU; creates it if needed."""
    sys.path.insert(0, str(SUPPORT))
    from cpu_environment import environment_variables

    os.environ.update(ENVIRONMENT | environment_variables() | {"RLLM_CACHE_DIR": str(HERE / "cache")})
    # Ray's workers also load `benchmarks.verl_peer`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    if Path(sys.prefix).resolve() == HERE.resolve():
        return
    subprocess.run(["make", f"{HERE.name}/.installed"], check=True, cwd=ROOT, stdout=sys.stderr)
    os.chdir(ROOT)
    python = HERE / "bin" / "python"
    os.execv(python, [str(python), "-m", "benchmarks.verl", *arguments])


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Measures the selected parts on one Ray cluster."""
    from rllm_local.starter import starter_model

    from benchmarks.endless import make_endless_model

    starter = starter_model()
    with tempfile.TemporaryDirectory() as folder, ray_cluster() as address:
        for workload in FIGURE_SUFFIXES:
            if workload in options.parts:
                path = make_endless_model(starter, Path(folder) / "model") if workload == "endless" else starter
                take_turns(workload, str(path), address, options, trials)
        if "async" in options.parts and not options.lora:
            for number in range(options.rounds):
                for mode in MODES[:: 1 if number % 2 == 0 else -1]:
                    row = {"kind": "run", "mode": mode, "round": number}
                    trials.add(row | train_in_mode(mode, str(starter), address, options))
                    print(json.dumps(trials.rows[-1]), file=sys.stderr, flush=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """Starts a cluster on this machine and yields its address; it ends with this process.

    Both sides share one cluster, because verl names its sockets by Ray job number, and two clusters would use the same
    numbers.
    """
    import ray

    with _environment({SIDE_VARIABLE: CLUSTER}):
        ray.init(
            address="local",
            num_cpus=64,
            num_gpus=3,  # declared only; Ray does not look for them
            include_dashboard=False,
            object_store_memory=500_000_000,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


# --------------------------------------------------------------------------------------------------------------------
# Comparison with main_ppo


def take_turns(workload: str, model: str, address: str, options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains all sides, taking turns at every step."""
    steps = WARM_UP_STEPS + options.steps
    with contextlib.ExitStack() as open_sides:
        sides = []
        for name in (*SIDES, UNCHECKED) if options.lora else SIDES:
            side = Side(name, "benchmarks.verl_sides", variables={SIDE_VARIABLE: name})
            sides.append(open_sides.enter_context(side))
        for side in sides:
            request = {
                "name": workload,
                "model": model,
                "ray_address": address,
                "steps": steps,
                "seed": options.seed,
                "lora_rank": LORA_RANK if options.lora else 0,
                "sync_check_every": FIRST_SYNC_ONLY if side.name == UNCHECKED else 1,
            }
            side.begin({"side": side.name, **request})
        for step in range(steps):
            for side in sides[:: 1 if step % 2 == 0 else -1]:
                row = {"kind": "step", "workload": workload, "side": side.name, "warm_up": step < WARM_UP_STEPS}
                row |= {"lora": options.lora} | _timed(side, [other.name for other in sides if other is not side])
                trials.add(row)
                print(
                    f"{side.name:>8} step {row['step']}: {row['wall_seconds']:.2f} s, CPU {_cpu_seconds(row):.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
        for side in sides:
            side.end()


def _timed(side: Side, waiting: Sequence[str]) -> Row:
    load, before = os.getloadavg()[0], cpu_seconds()
    row: Row = side.step()
    after = cpu_seconds()
    del row["cpu_seconds"]  # covers only one of many processes
    return {
        **row,
        "cpu_seconds_by_process": spent(before, after, side.name),
        "cluster_cpu_seconds": spent(before, after, CLUSTER),
        "waiting_cpu_seconds": {name: sum(spent(before, after, name).values()) for name in waiting},
        "load_average": load,
    }


# --------------------------------------------------------------------------------------------------------------------
# Asynchronous


def train_in_mode(mode: str, model: str, address: str, options: argparse.Namespace) -> Row:
    """Runs ours in a separate process, because a process can join Ray only once."""
    with tempfile.TemporaryDirectory() as folder:
        request = {"mode": mode, "model": model, "ray_address": address, "steps": options.async_steps}
        request |= {"seed": options.seed, "folder": str(Path(folder) / "run")}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.verl_waiting", json.dumps(request)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, SIDE_VARIABLE: mode},
        )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the measured parts."""
    found: Figures = {}
    for lora, beginning in ((False, ""), (True, "lora_")):
        for workload, ending in FIGURE_SUFFIXES.items():
            of_workload = _versus(rows, workload, lora=lora)
            found |= {f"{beginning}{name}{ending}": value for name, value in of_workload.items()}
    for workload, ending in FIGURE_SUFFIXES.items():
        found |= {f"{name}{ending}": value for name, value in _checks(rows, workload).items()}
    return found | _asynchronous(rows)


def _versus(rows: Sequence[Row], workload: str, *, lora: bool) -> Figures:
    alike = {"workload": workload, "warm_up": False, "lora": lora}
    timed = {name: of_kind(rows, "step", side=name, **alike) for name in SIDES}
    if not timed["ours"]:
        return {}
    found: Figures = {"steps": len(timed["ours"])}
    for ending, seconds_of in (("", _cpu_seconds), ("_wall", _wall_seconds)):
        ours, theirs = ([seconds_of(row) for row in timed[name]] for name in SIDES)
        found |= {
            f"seconds_per_step_over_main_ppo{ending}": round(paired_ratio(zip(theirs, ours, strict=True)), 3),
            f"seconds_per_step_over_main_ppo_total{ending}": round(sum(ours) / sum(theirs), 3),
        }
    for name in SIDES:
        others = of_kind(rows, "step", **alike)
        waited = [row["waiting_cpu_seconds"][name] for row in others if row["side"] != name]
        found |= {
            f"{name}_cpu_seconds": round(statistics.median(map(_cpu_seconds, timed[name])), 3),
            f"{name}_wall_seconds": round(statistics.median(map(_wall_seconds, timed[name])), 3),
            f"{name}_waiting_cpu_seconds": round(statistics.median(waited), 3),
            f"{name}_cpu_seconds_by_process": _by_process(timed[name]),
        }
    return found


def _checks(rows: Sequence[Row], workload: str) -> Figures:
    """Share of a step that the checks of the servers take."""
    alike = {"workload": workload, "warm_up": False, "lora": True}
    timed = {name: of_kind(rows, "step", side=name, **alike) for name in ("ours", UNCHECKED)}
    if not timed["ours"]:
        return {}
    checked, unchecked = (sum(map(_cpu_seconds, of_side)) for of_side in timed.values())
    return {
        "canary_share": round(sum(row["check_cpu_seconds"] for row in timed["ours"]) / checked, 4),
        "canary_share_paired": round(1 - unchecked / checked, 4),
        "unchecked_cpu_seconds": round(statistics.median(map(_cpu_seconds, timed[UNCHECKED])), 3),
    }


def _by_process(rows: Sequence[Row]) -> dict[str, float]:
    """Returns median seconds per step of each kind of process, largest first; Ray's daemons count as one."""
    parts = [row["cpu_seconds_by_process"] | {CLUSTER: sum(row["cluster_cpu_seconds"].values())} for row in rows]
    names = {name for part in parts for name in part}
    medians = {name: round(statistics.median(part.get(name, 0.0) for part in parts), 3) for name in names}
    return dict(sorted(((name, value) for name, value in medians.items() if value), key=lambda item: -item[1]))


def _cpu_seconds(row: Row) -> float:
    return float(sum(row["cpu_seconds_by_process"].values()) + sum(row["cluster_cpu_seconds"].values()))


def _wall_seconds(row: Row) -> float:
    return float(row["wall_seconds"])


def _asynchronous(rows: Sequence[Row]) -> Figures:
    runs = {mode: {row["round"]: row for row in of_kind(rows, "run", mode=mode)} for mode in MODES}
    if not all(runs.values()):
        return {}
    found: Figures = {
        f"{mode}_step_seconds": round(statistics.median(map(step_seconds, runs[mode].values())), 2) for mode in MODES
    }
    last = runs[MODES[-1]]
    for mode in MODES[:-1]:
        pairs = [(step_seconds(row), step_seconds(last[number])) for number, row in runs[mode].items()]
        found[f"async_over_sync_{mode.partition('_')[2]}"] = round(paired_ratio(pairs), 3)
    found["async_over_sync"] = max(found["async_over_sync_colocated"], found["async_over_sync_separated"])
    found["async_staleness_mean"] = round(statistics.fmean(row["staleness_mean"] for row in last.values()), 2)
    return found


def step_seconds(row: Row) -> float:
    """Returns the mean wall seconds of a step once the pipeline is full; a mean, as asynchronous steps are uneven."""
    return statistics.fmean(row["step_seconds"][FILLING_STEPS:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--lora", action="store_true", help="train adapters, and measure what the checks of syncs cost")
    parser.add_argument("--steps", type=int, default=20, help="timed steps per side, compared with main_ppo")
    parser.add_argument("--async-steps", type=int, default=13, help="steps per run with a workflow that waits")
    parser.add_argument("--rounds", type=int, default=2, help="runs per mode with a workflow that waits")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--from-raw" not in " ".join(given) and not {"-h", "--help"} & set(given):
        enter_environment(given)
    run("verl", parser, measure, figures, given)


if __name__ == "__main__":
    main()

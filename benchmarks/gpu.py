"""Speed of backends ``local`` and ``verl`` on one GPU, relative to TRL with vLLM and to verl's own ``main_ppo``.

    python -m benchmarks.gpu --sides local trl --trl-python PYTHON   # ten minutes on one GPU
    python -m benchmarks.gpu --sides verl main_ppo                   # another ten
    python -m benchmarks.gpu --sides verl main_ppo --alternate       # on 141 GB, where both fit
    python -m benchmarks.gpu --trl-python PYTHON --minutes 20        # all sides
    python -m benchmarks.gpu --trl-sampler transformers --sides local trl   # without vLLM and verl
    python -m benchmarks.gpu --tiny-cpu               # sides local and trl, with a tiny model on a CPU

All sides train the same model: the shape of Qwen2.5-0.5B with a vocabulary of 151,936 and random weights, with 256
completions of exactly 256 tokens per step (see `endless`). Weights are float32, and passes are computed in bfloat16.
TRL samples with vLLM in its own process, or with transformers (``--trl-sampler``). The sides run one after the other,
because two would not have the memory that each has alone on 80 GB; a side that fails or has no time left does not stop
the others. With ``--alternate``, they take turns at every step, and the GPU must hold them all.

Figures: ``local_steps_per_second_over_trl`` and ``verl_seconds_per_step_over_main_ppo``, of medians of wall times;
``step_ms``, ``tokens_per_second`` and ``gpu_memory_mb`` by side (the last not with ``--alternate``); ``trl_sampler``;
``failed`` by side, if any.

Run it in the environment of ``rllm-verl[gpu]`` with ``rllm-local``, ``rllm-workflows`` and datasets. TRL must be in
another environment, with vLLM, ``rllm-local`` and ``rllm-workflows``: verl's trainers do not start beside TRL 1.13 or
newer.
``--tiny-cpu`` samples with transformers on TRL's side, and enters ``.venv-bench``; its figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer

from benchmarks.peer_environments import enter_peer_environment
from benchmarks.sides import Side, SideError
from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from benchmarks.verl_processes import SIDE_VARIABLE

WARM_UP_STEPS = 2
MAX_STEPS = 8
"""Maximum timed steps of a side."""
RESERVED_SECONDS = 45.0
"""Time reserved for building the model, and for ending the sides."""
MODULES = {
    "local": "benchmarks.core_side",
    "trl": "benchmarks.trl_side",
    "verl": "benchmarks.verl_sides",
    "main_ppo": "benchmarks.verl_sides",
}
VERL_SIDES = {"verl": "ours", "main_ppo": "main_ppo"}
JOINING_VARIABLES = {"RAY_AUTH_MODE": "token"}
"""Ray sets it in the process that starts a cluster; others need it to join."""
ON_CPU = ("local", "trl")
NO_GPU = (
    "benchmarks.gpu: error: torch finds no GPU on this machine; --tiny-cpu runs the sides local and trl with a tiny "
    "model on the CPU"
)


@dataclass(frozen=True)
class Turn:
    """A side, and the seconds after which it is ended."""

    side: str
    seconds: float


def seconds_per_side(minutes: float, sides: int) -> float:
    """Returns the seconds of a side if all sides use up theirs.

    Raises:
        ValueError: If no time is left for a side.
    """
    seconds = (60 * minutes - RESERVED_SECONDS) / sides
    if seconds <= 0:
        raise ValueError(f"--minutes {minutes:g} leaves no time for {sides} sides")
    return seconds


def turns(sides: Sequence[str], until: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Turn]:
    """Yields the sides, each with an equal part of the time that is left until ``until`` when it is its turn.

    Sides such as verl, which start for minutes, get what those before them did not need.
    """
    for index, side in enumerate(sides):
        yield Turn(side, max(0.0, until - clock()) / (len(sides) - index))


def request_of(side: str, model: Path, device: str, ray_address: str, trl_sampler: str = "vllm") -> Row:
    """Returns what a side is asked to train."""
    workload, steps = "gpu" if device == "cuda" else "gpu_tiny", WARM_UP_STEPS + MAX_STEPS
    asked = {"model": str(model), "seed": 0, "steps": steps, "device": device}
    if side in VERL_SIDES:
        return {**asked, "side": VERL_SIDES[side], "name": workload, "ray_address": ray_address}
    if side == "trl":
        asked["sampler"] = "transformers" if device == "cpu" else trl_sampler
    return {**asked, "workload": workload}


def train(turn: Turn, request: Row, python: str, trials: RawTrials) -> None:
    """Trains a side until its time is over, and adds a row per step; a failure is a row as well."""
    steps = 0
    with _limited([turn.side], turn.seconds, lambda: steps, trials) as started:
        side = started(turn.side, python)
        side.begin(request)
        while steps < request["steps"]:
            row = side.step()
            steps += 1
            trials.add(row_of(turn.side, request, row, gpu_memory_mb(request["device"])))
        side.end()


def train_in_turns(requests: dict[str, Row], pythons: dict[str, str], seconds: float, trials: RawTrials) -> None:
    """Trains all sides, which take turns at every step once they are warm, until the time is over.

    They warm up one after the other: vLLM does not start while another process releases memory of its GPU.
    """
    steps = 0
    with _limited(list(requests), seconds, lambda: steps, trials) as started:
        sides = [started(name, pythons[name]) for name in requests]

        def train_step(side: Side) -> None:
            trials.add(row_of(side.name, requests[side.name], side.step()))

        for side in sides:
            side.begin(requests[side.name])
            for _ in range(WARM_UP_STEPS):
                train_step(side)
        steps = WARM_UP_STEPS
        while steps < WARM_UP_STEPS + MAX_STEPS:
            for side in sides[:: 1 if steps % 2 == 0 else -1]:
                train_step(side)
            steps += 1
        for side in sides:
            side.end()


def row_of(side: str, request: Row, step: Row, memory_mb: int | None = None) -> Row:
    """Returns the row of a side's step."""
    sampler = {"sampler": request["sampler"]} if "sampler" in request else {}
    return {"kind": "step", "side": side, **sampler, **step, "gpu_memory_mb": memory_mb}


@contextlib.contextmanager
def _limited(
    names: Sequence[str], seconds: float, steps: Callable[[], int], trials: RawTrials
) -> Iterator[Callable[[str, str], Side]]:
    """Yields what starts a side, ends all sides when the time is over, and adds a row per side if it was too short."""
    until = time.monotonic() + seconds
    running: list[Side] = []

    def end_all() -> None:
        for side in running:
            side.kill()

    limit = Timer(seconds, end_all)
    limit.start()
    try:
        with contextlib.ExitStack() as stack:

            def started(name: str, python: str) -> Side:
                variables = {SIDE_VARIABLE: name, **JOINING_VARIABLES}
                running.append(stack.enter_context(Side(name, MODULES[name], python, variables)))
                return running[-1]

            yield started
    except SideError as error:
        is_late = time.monotonic() >= until
        if not is_late or steps() <= WARM_UP_STEPS:
            reason = f"no time left after {steps()} steps; use --minutes" if is_late else str(error)
            for name in names:
                trials.add({"kind": "failed", "side": name, "reason": reason})
    finally:
        limit.cancel()


def gpu_memory_mb(device: str) -> int | None:
    """Returns what all processes use of the first GPU."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def ray_cluster(side: str) -> Iterator[str]:
    """Starts a cluster with one GPU for a side that needs it, and yields its address.

    It has a process of its own, so that the clusters of two sides do not share their GPU's place.
    """
    if side not in VERL_SIDES:
        yield ""
        return
    context = multiprocessing.get_context("spawn")
    ours, others = context.Pipe()
    process = context.Process(target=_serve_cluster, args=(others, list(VERL_SIDES).index(side)))
    process.start()
    others.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve_cluster(parent: Connection, earlier_jobs: int) -> None:
    import ray

    ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    for _ in range(earlier_jobs):  # verl names sockets in /tmp after the number of its job, from 1 in every cluster
        ray._private.state.next_job_id()
    parent.send(ray.get_runtime_context().gcs_address)
    with contextlib.suppress(EOFError):
        parent.recv()  # until the parent closes its end
    ray.shutdown()


def make_gpu_model(folder: Path, device: str) -> Path:
    """Writes the model, which never samples its end of a turn; a tiny one for the CPU."""
    from benchmarks.endless import make_endless_model

    if device == "cpu":
        from rllm_local.starter import starter_model

        return make_endless_model(starter_model(0), folder / "endless")
    from benchmarks.gpu_models import make_model

    return make_endless_model(make_model(folder / "random", "0.5b", device), folder / "endless")


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains the sides, one after the other or in turns."""
    device = "cpu" if options.tiny_cpu else "cuda"
    sides = options.sides or (ON_CPU if options.tiny_cpu else list(MODULES))
    until = time.monotonic() + len(sides) * seconds_per_side(options.minutes, len(sides))
    with tempfile.TemporaryDirectory() as folder:
        model = make_gpu_model(Path(folder), device)
        pythons = {side: options.trl_python if side == "trl" else sys.executable for side in sides}
        if options.alternate:
            with contextlib.ExitStack() as stack:
                requests = {
                    side: request_of(side, model, device, stack.enter_context(ray_cluster(side)), options.trl_sampler)
                    for side in sides
                }
                train_in_turns(requests, pythons, until - time.monotonic(), trials)
            return
        for turn in turns(sides, until):
            with ray_cluster(turn.side) as address:
                request = request_of(turn.side, model, device, address, options.trl_sampler)
                train(turn, request, pythons[turn.side], trials)


# --------------------------------------------------------------------------------------------------------------------
# Figures


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures of the sides that were timed."""
    timed = {side: [row for row in of_kind(rows, "step", side=side) if row["step"] > WARM_UP_STEPS] for side in MODULES}
    seconds = {side: statistics.median(row["wall_seconds"] for row in found) for side, found in timed.items() if found}
    found: Figures = {}
    if {"local", "trl"} <= seconds.keys():
        found["local_steps_per_second_over_trl"] = round(seconds["trl"] / seconds["local"], 2)
    if VERL_SIDES.keys() <= seconds.keys():
        found["verl_seconds_per_step_over_main_ppo"] = round(seconds["verl"] / seconds["main_ppo"], 3)
    found["timed_steps"] = {side: len(timed[side]) for side in seconds}
    found["step_ms"] = {side: round(1e3 * value, 1) for side, value in seconds.items()}
    found["tokens_per_second"] = {
        side: round(timed[side][-1]["sampled_tokens"] / value)
        for side, value in seconds.items()
        if "sampled_tokens" in timed[side][-1]  # main_ppo does not tell
    }
    memory = {side: [row["gpu_memory_mb"] for row in timed[side] if row["gpu_memory_mb"]] for side in seconds}
    found["gpu_memory_mb"] = {side: max(values) for side, values in memory.items() if values}
    samplers = [row["sampler"] for row in timed["trl"] if "sampler" in row]
    found |= {"trl_sampler": samplers[0]} if samplers else {}
    failed = {row["side"]: row["reason"] for row in of_kind(rows, "failed")}
    return found | ({"failed": failed} if failed else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=list(MODULES), help="what to train (default all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time of all sides together")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL and vLLM")
    parser.add_argument("--trl-sampler", choices=("vllm", "transformers"), default="vllm", help="what TRL samples with")
    parser.add_argument("--alternate", action="store_true", help="let the sides take turns at every step")
    parser.add_argument("--tiny-cpu", action="store_true", help="train a tiny model on the CPU, without vLLM and verl")
    options, others = parser.parse_known_args(given)
    if not any(argument.startswith("--from-raw") for argument in others):
        check(parser, options, given)
    run("gpu", parser, measure, figures, given)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, given: list[str]) -> None:
    """Ends with a line on what is wrong, before an earlier run's rows are replaced."""
    if options.tiny_cpu:
        if not set(options.sides or ()) <= set(ON_CPU):
            parser.error(f"--tiny-cpu trains only the sides {' and '.join(ON_CPU)}")
        enter_peer_environment("benchmarks.gpu", given)
        return
    import torch

    if not torch.cuda.is_available():
        parser.exit(2, f"{NO_GPU}\n")


if __name__ == "__main__":
    main()

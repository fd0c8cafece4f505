"""Speed of backends ``local`` and ``verl`` on one GPU, relative to TRL with vLLM and to verl's own ``main_ppo``.

    python -m benchmarks.gpu --sides local trl --trl-python PYTHON   # ten minutes on one GPU
    python -m benchmarks.gpu --sides verl main_ppo                   # another ten
    python -m benchmarks.gpu --trl-python PYTHON --minutes 20        # all sides
    python -m benchmarks.gpu --trl-sampler transformers --sides local trl   # without vLLM and verl
    python -m benchmarks.gpu --tiny-cpu               # sides local and trl, with a tiny model on a CPU

All sides train the same model: the shape of Qwen2.5-0.5B with a vocabulary of 151,936 and random weights, with 256
completions of exactly 256 tokens per step (see `endless`). Weights are float32, and passes are computed in bfloat16.
TRL samples with vLLM in its own process, or with transformers (``--trl-sampler``). The sides run one after the other,
because two would not have the memory that each has alone; a side that fails or has no time left does not stop the
others.

Figures: ``local_steps_per_second_over_trl`` and ``verl_seconds_per_step_over_main_ppo``, of medians of wall times;
``step_ms``, ``tokens_per_second`` and ``gpu_memory_mb`` by side; ``trl_sampler``; ``failed`` by side, if any.

Run it in the environment of ``rllm-verl[gpu]`` with ``rllm-local``, ``rllm-workflows`` and datasets. TRL must be in
another environment, with vLLM, ``rllm-local`` and ``rllm-workflows``: verl's trainers do not start beside TRL 1.13 or
newer.
``--tiny-cpu`` samples with transformers on TRL's side, and enters ``.venv-bench``; its figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    until = time.monotonic() + turn.seconds
    side = Side(turn.side, MODULES[turn.side], python, {SIDE_VARIABLE: turn.side})
    limit = Timer(turn.seconds, side.kill)
    limit.start()
    steps = 0
    sampler = {"sampler": request["sampler"]} if "sampler" in request else {}
    try:
        with side:
            side.begin(request)
            while steps < request["steps"]:
                row = side.step()
                steps += 1
                memory = {"gpu_memory_mb": gpu_memory_mb(request["device"])}
                trials.add({"kind": "step", "side": turn.side, **sampler, **row, **memory})
            side.end()
    except SideError as error:
        is_late = time.monotonic() >= until
        if not is_late or steps <= WARM_UP_STEPS:
            reason = f"no time left after {steps} steps; use --minutes" if is_late else str(error)
            trials.add({"kind": "failed", "side": turn.side, "reason": reason})
    finally:
        limit.cancel()


def gpu_memory_mb(device: str) -> int | None:
    """Returns what all processes use of the first GPU."""
    if device == "cpu":
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def ray_cluster(sides: Sequence[str]) -> Iterator[str]:
    """Starts a cluster with one GPU if a side needs it, and yields its address; it ends with this process."""
    if not VERL_SIDES.keys() & set(sides):
        yield ""
        return
    import ray

    ray.init(address="local", num_gpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
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
    """Trains the sides, one after the other."""
    device = "cpu" if options.tiny_cpu else "cuda"
    sides = options.sides or (ON_CPU if options.tiny_cpu else list(MODULES))
    until = time.monotonic() + len(sides) * seconds_per_side(options.minutes, len(sides))
    with tempfile.TemporaryDirectory() as folder:
        model = make_gpu_model(Path(folder), device)
        with ray_cluster(sides) as address:
            for turn in turns(sides, until):
                python = options.trl_python if turn.side == "trl" else sys.executable
                request = request_of(turn.side, model, device, address, options.trl_sampler)
                train(turn, request, python, trials)


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

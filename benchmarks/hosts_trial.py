"""One trial of `benchmarks.hosts`, in its own process: runs rollouts in a host, and measures both sides of it.

    python -m benchmarks.hosts_trial '{"host": "processes", "rollouts": 64, "turns": 5, ...}'

Prints one row.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import rllm_devkit.scripted_plugin
from benchmarks import hosted_talk
from benchmarks.bytes_parser import Bytes
from benchmarks.orchestrator import Pulse, percentile
from benchmarks.trials import Row
from rllm_core.assembly.parts import host_of, workflow_of
from rllm_core.assembly.resolution import load_run_config, providers_of
from rllm_core.hosts import wire
from rllm_core.hosts.contract import RolloutHost
from rllm_core.plugins import PluginManager
from rllm_core.runs.launch import rare_collections
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import TokenOutput
from rllm_devkit.scripted import Script, ScriptedEngine

ANSWER = "a word of the model " * (hosted_talk.CHARACTERS // 20)
PROCESS_CLOCK = 2  # kernel: CPUCLOCK_SCHED, the exact time on a CPU


class Measured(ScriptedEngine):
    """Answers at once; or, with ``together``, when that many rollouts have called it.

    Args:
        together: Number of rollouts that take their turns together; 0 for each on its own.
        on_turn: Called with the number of each turn at its start, when only the engine has work.
    """

    def __init__(self, together: int, on_turn: Callable[[int], None]) -> None:
        super().__init__(Bytes(), Script(good=ANSWER), skill=1.0)
        self._together = together
        self._on_turn = on_turn
        self._turn = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def get_token_outputs_from_token_input(self, *prompt: Any, **options: Any) -> list[TokenOutput]:
        """See `RolloutEngine.get_token_outputs_from_token_input`."""
        if self._together:
            arrived = asyncio.get_running_loop().create_future()
            self._waiting.append(arrived)
            if len(self._waiting) == self._together:
                waiting, self._waiting = self._waiting, []
                self._turn += 1
                self._on_turn(self._turn)
                for other in waiting:
                    other.set_result(None)
            await arrived
        return await super().get_token_outputs_from_token_input(*prompt, **options)


class Traffic:
    """Counts what crosses between the run and its workers: frames, messages in them, and bytes."""

    def __init__(self) -> None:
        self.counts = {f"{what}_{way}": 0 for way in ("sent", "received") for what in ("frames", "messages", "bytes")}
        encoded, decode = wire.encoded, wire.decode_from_worker

        def counting_encoded(messages: list[Any]) -> bytes:
            content = encoded(messages)
            self._count("sent", messages, content)
            return content

        def counting_decode(content: bytes) -> list[Any]:
            messages = decode(content)
            self._count("received", messages, content)
            return messages

        wire.encoded, wire.decode_from_worker = counting_encoded, counting_decode  # type: ignore[assignment]

    def count_ray_calls(self) -> None:
        """Counts the calls of Ray actors that send something to a worker, from now on; Ray is imported then."""
        actors: Any = import_module("ray.actor")
        remote = actors.ActorMethod._remote
        self.counts["ray_calls"] = 0

        def counting_remote(method: Any, *arguments: Any, **options: Any) -> Any:
            self.counts["ray_calls"] += method._method_name == "send"
            return remote(method, *arguments, **options)

        actors.ActorMethod._remote = counting_remote

    def _count(self, way: str, messages: list[Any], content: bytes) -> None:
        for what, number in (("frames", 1), ("messages", len(messages)), ("bytes", len(content))):
            self.counts[f"{what}_{way}"] += number


def play(request: Row) -> Row:
    """Runs a trial.

    Args:
        request: ``host``, ``workers``, ``rollouts``, ``turns``, ``work_seconds``, ``concurrent``, and ``together``:
            whether all rollouts take their turns together, so that turns can be measured separately.

    Raises:
        RuntimeError: If a rollout failed.
    """
    host, engine_of, tasks, config = _parts(request)
    return {"kind": "trial", **request, **asyncio.run(_play(request, host, engine_of, tasks, config))}


def _parts(request: Row) -> Any:
    is_inline = request["host"] == "inline"
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(hosted_talk, "hosted_talk")
    if request["host"] == "ray":
        plugins.register(import_module("rllm_ray"), "rllm-ray")
    settings = {
        "rollout.host": request["host"],
        **({} if is_inline else {"rollout.workers": request["workers"]}),
        **({"ray.address": os.environ["RAY_ADDRESS"]} if request["host"] == "ray" else {}),
        "rollout.max_concurrent_rollouts": request["concurrent"],
        "rollout.max_concurrent_requests": request["concurrent"],
        "rollout.rollout_timeout_seconds": 3600,
        "rollout.max_response_tokens": 2 * len(ANSWER),
        "talk.tasks": request["rollouts"],
        "talk.turns": request["turns"],
        "talk.work_seconds": request["work_seconds"],
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    resolved = providers_of(load_run_config("talk", plugins, overrides=overrides, backend="scripted"), plugins)
    workflow = workflow_of(resolved)
    return host_of(resolved, workflow), Measured, workflow.tasks("train"), resolved.config


async def _play(request: Row, host: RolloutHost, engine_of: Any, tasks: Any, config: Any) -> Row:
    turns: list[Row] = []
    pids: list[int] = []
    traffic = Traffic()

    def reading() -> Row:
        return {"driver_cpu_seconds": time.process_time(), "worker_cpu_seconds": _cpu_seconds(pids), **traffic.counts}

    engine = engine_of(
        request["rollouts"] if request["together"] else 0,
        lambda turn: turns.append({"turn": turn, **reading()}),
    )
    began, cpu = time.perf_counter(), time.process_time()
    await host.open(note=lambda line: print(line, file=sys.stderr), settled=lambda: None, folder=None)
    pids += [worker.pid for worker in getattr(host, "workers", [])]
    if request["host"] == "ray":
        traffic.count_ray_calls()
    row: Row = {
        "start_wall_seconds": time.perf_counter() - began,
        "start_driver_cpu_seconds": time.process_time() - cpu,
        "start_worker_cpu_seconds": _cpu_seconds(pids),
    }
    try:
        runner = RolloutRunner(host, engine, config, lockstep=False)
        pulse = Pulse()
        with rare_collections():  # as in a run
            beating = asyncio.create_task(pulse.beat()) if request["beats"] else None
            first, began = reading(), time.perf_counter()
            played = await asyncio.gather(
                *(runner.run(task, RolloutKey("train", ordinal, 0)) for ordinal, task in enumerate(tasks))
            )
            wall, last = time.perf_counter() - began, reading()
        row |= {"wall_seconds": wall, "worker_memory_mb": [_memory_mb(pid) for pid in pids]}
        if beating is not None:
            beating.cancel()
            row |= _lags(pulse)
    finally:
        await host.close()
    for rollout in played:
        if rollout.episode.error or len(rollout.episode.trajectories[0].steps) != request["turns"]:
            raise RuntimeError(f"a rollout failed: {rollout.episode.error}")
    return row | _differences(first, last) | {"by_turn": turns}


def _lags(pulse: Pulse) -> Row:
    lags, alone = sorted(pulse.lags_seconds), sorted(pulse.lags_alone_seconds)
    return {
        "beats": len(lags),
        "lag_p99_ms": 1e3 * percentile(lags, 0.99),
        "lag_p99_alone_ms": 1e3 * percentile(alone, 0.99),
        "lag_max_ms": 1e3 * lags[-1],
    }


def _differences(first: Row, last: Row) -> Row:
    """Returns how much each count grew; times of workers one by one."""
    workers = zip(first["worker_cpu_seconds"], last["worker_cpu_seconds"], strict=True)
    grown = {key: last[key] - first[key] for key in first if key != "worker_cpu_seconds"}
    return {**grown, "worker_cpu_seconds": [after - before for before, after in workers]}


def _cpu_seconds(pids: Sequence[int]) -> list[float]:
    """Returns the exact CPU time of each worker so far, with that of the process that carries its messages."""
    return [_clock(pid) + (_clock(parent) if (parent := _parent(pid)) != os.getpid() else 0.0) for pid in pids]


def _clock(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _memory_mb(pid: int) -> dict[str, float]:
    """Returns the memory of a process: all of it, that of its own, and with its share of what it shares."""
    sizes = {"rss": 0, "pss": 0, "uss": 0}
    names = {"Rss": "rss", "Pss": "pss", "Private_Clean": "uss", "Private_Dirty": "uss"}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, size = line.split()[:2]
        if kind := names.get(name.rstrip(":")):
            sizes[kind] += int(size)
    return {kind: kilobytes * 1024 / 1e6 for kind, kilobytes in sizes.items()}


def main() -> None:
    """Runs the trial that the only argument describes."""
    row = play(json.loads(sys.argv[1]))
    print(json.dumps({**row, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()

"""Runs of backend ``verl`` on a CPU: their hardware section, and a run in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from in_process import run_in_process

from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager

COMMAND = Path(sys.executable).with_name("rllm-core")
RUN_SECONDS = 1500.0  # ends a run that hangs; far longer than one takes on a busy machine
# Largest difference between server and trainer for one token of a trained policy, in nats. The mean is always below
# 1e-5, or the run ends (`verl.sync_tolerance`). That no token exceeds it cannot be asked of float32, where both round.
# Compared with float64, on tokens that weight syncs sampled, the root mean square of the errors and the greatest one:
#
#                                                server             trainer            transformers in one process
#   5,120 tokens, with trained adapters          1.2e-6, 1.0e-5     1.5e-6, 1.2e-5     1.4e-6, 1.0e-5
#   3,072 tokens, of an agent in actors of Ray   1.3e-6, 1.1e-5     1.4e-6, 1.2e-5     1.4e-6, 1.1e-5
#
# Server and trainer differed by more than 1e-5 on 2 and 1 of them, with log-probabilities from -6.5 to -1.
GREATEST_GAP_LEARNT = 3e-5
# Small Ray processes that notice only after a while that their parent has exited.
RAYS_OWN = ("ray::DashboardA", "ray::RuntimeEnvAgent")
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
# Blocks of 128 tokens: the longest completions of 64 rows. vLLM clears the memory of all blocks when it starts.
BLOCKS = f'"{VLLM}.num_gpu_blocks_override"=2048'
# vLLM's engine computes itself. By default, a worker process does, which takes seconds to start, and waits for a second
# after each call in a loop that keeps a core busy.
ONE_PROCESS = f'"{VLLM}.distributed_executor_backend"="uni", {BLOCKS}'
WITH_WORKER_PROCESSES = f"verl.overrides={{{BLOCKS}}}"
# Hardware of a run, and a batch that takes a CPU about a second.
ON_A_CPU = (
    "verl.device=cpu",
    "verl.dtype=float32",
    "verl.attention=sdpa",
    "verl.release_memory=false",
    "verl.cuda_graphs=false",
    "verl.gradient_checkpointing=false",
    "verl.server_memory_share=0.1",
    "verl.max_batch_rows=64",
    # On a CPU, vLLM 0.28 fails on a seeded request whose prompt takes two passes; 64 short prompts fit into one.
    "verl.max_batch_tokens=8192",
    # On a CPU, the trainer computes the attention of each token to all others of its pass: at 4,096 tokens, that took
    # most of a step.
    "verl.max_tokens_per_device=1024",
    "verl.sync_bucket_mb=16",
    "verl.sync_tolerance=1e-5",
    f"verl.overrides={{{ONE_PROCESS}}}",
)
SEPARATED = (
    "verl.placement=separated",
    "verl.checkpoint_engine=cpu_file",
    "verl.checkpoint_engine_module=cpu_checkpoint_engine",
)
ASYNCHRONOUS = (*SEPARATED, "training.staleness_threshold=1")


def overrides(model: Path, *more: str) -> list[str]:
    """A small run of the starter task, as values of ``-o``."""
    small = ("training.groups_per_step=8", "training.rollouts_per_group=8", "training.validation_rollouts=0")
    return [f"model.path={model}", *ON_A_CPU, *small, *more]


def run_config(model: Path, *more: str) -> RunConfig:
    """Run file of the same run, resolved."""
    return load_run_config(
        "sort",
        PluginManager.from_environment(),
        overrides=overrides(model, *more),
        backend="verl",
        parser="chat_template",
    )


def arguments(path: Path, model: Path, *more: str, workflow: str = "sort") -> list[str]:
    """Arguments of ``rllm-core train`` for the same run in the folder ``path``."""
    options = [word for override in overrides(model, *more) for word in ("-o", override)]
    return [workflow, "--backend", "verl", "--parser", "chat_template", "--run-dir", str(path), *options]


@dataclass
class Trained:
    """The files of a training run.

    Attributes:
        path: Run folder.
    """

    path: Path

    @classmethod
    def here(cls, path: Path, model: Path, *more: str) -> Trained:
        """Trains in this process, which has imported verl already, until the run completes."""
        done = run_in_process(["train", *arguments(path, model, *more)], folder=path.parent, environment=os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return cls(path)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Complete lines of ``NAME.jsonl``."""
        path = self.path / f"{name}.jsonl"
        whole = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in whole if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        """Contents of ``summary.json``."""
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        return found


@dataclass
class Run(Trained):
    """A training run in its own process.

    Attributes:
        process: Process of the run.
        log: File with the output of the process.
    """

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, path: Path, model: Path, *more: str, workflow: str = "sort") -> Run:
        """Starts ``rllm-core train WORKFLOW --backend verl`` with ``more`` overrides."""
        return cls._start(path, arguments(path, model, *more, workflow=workflow))

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Starts ``rllm-core train --resume``."""
        return cls._start(path, ["--resume", "--run-dir", str(path)])

    @classmethod
    def _start(cls, path: Path, arguments: list[str]) -> Run:
        log = path.with_name(f"{path.name}.{time.monotonic_ns()}.log")
        with log.open("wb") as output:
            process = subprocess.Popen([str(COMMAND), "train", *arguments], stdout=output, stderr=output)
        return cls(path, process, log)

    def wait(self) -> int:
        """Waits for the exit status. A run that does not end in time is killed, and fails the test."""
        try:
            return self.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end in {RUN_SECONDS:g} s:\n{self.printed()}") from None

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the remaining processes, see `processes`."""
        left = self.processes()
        self.process.kill()
        self.process.wait()
        heavy = [each for each in left if not command_line(each).startswith(RAYS_OWN)]
        _, alive = psutil.wait_procs(heavy, timeout=60)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        assert not alive, f"these outlived their driver: {alive}"

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The process and its descendants with ``name`` in their command lines."""
        try:
            whole = psutil.Process(self.process.pid)
        except psutil.NoSuchProcess:
            return []
        return [each for each in [whole, *whole.children(recursive=True)] if name in command_line(each)]

    def kill_one(self, name: str) -> None:
        """Sends SIGKILL to the one process with ``name`` in its command line."""
        found = self.processes(name)
        assert len(found) == 1, [command_line(each) for each in self.processes()]
        os.kill(found[0].pid, signal.SIGKILL)

    def printed(self) -> str:
        """All output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds; fails if the run ends first."""
        deadline = time.monotonic() + RUN_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.printed()}"
            assert time.monotonic() < deadline, f"no {what} in {RUN_SECONDS:g} s:\n{self.printed()}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        """Waits until ``step`` optimizer steps are done and the servers have their weights."""
        self.wait_for(f"step {step}", lambda: len(self.lines("metrics")) >= step)


def command_line(process: psutil.Process) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def verify(path: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``rllm-core verify``."""
    return run_in_process(["verify", str(path)], folder=path, environment=os.environ)

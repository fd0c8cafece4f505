"""Soak test: leaks of memory, threads, descriptors and tasks in a long run with faults, in one process.

    python -m benchmarks.soak --episodes 100000

About one attempt in a hundred fails in the workflow or the engine, and is retried. Memory is read after every optimizer
step; its slope over the second half predicts the growth of longer runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.engine import EngineError
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_devkit.faults import Faults, raises, share

GROUPS_PER_STEP, ROLLOUTS_PER_GROUP = 20, 10
WARM_UP_STEPS = 5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Footprint:
    """Resources of a process, except memory."""

    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Footprint:
        """Reads the footprint of this process."""
        gc.collect()
        return cls(threading.active_count(), len(os.listdir("/proc/self/fd")))  # noqa: PTH208


@dataclass(frozen=True)
class Soaked:
    """Result of a soak test.

    Attributes:
        trained: Trained episodes.
        failed_attempts: Failed attempts that were retried.
        before: Footprint before the run.
        after: Footprint after the run.
        tasks_left: Tasks on the event loop after the run.
        bytes_per_episode_in_second_half: Slope of the resident memory.
        grown_mb: Resident memory at the end minus that after the first tenth.
    """

    trained: int
    failed_attempts: int
    before: Footprint
    after: Footprint
    tasks_left: int
    bytes_per_episode_in_second_half: float
    grown_mb: float


class MemoryOverSteps:
    """Plugin that reads the resident memory after every optimizer step."""

    def __init__(self) -> None:
        self.resident_bytes: list[int] = []

    @hookimpl
    async def on_batch_end(self) -> None:
        """Reads the resident memory."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.resident_bytes.append(pages * PAGE_BYTES)


def soak(run_dir: Path, *, episodes: int, failed_share: float) -> Soaked:
    """Trains the scripted policy asynchronously for ``episodes`` episodes, after a short warm-up run."""
    per_step = GROUPS_PER_STEP * ROLLOUTS_PER_GROUP
    asyncio.run(_train(run_dir / "warm-up", WARM_UP_STEPS, failed_share, MemoryOverSteps()))
    memory = MemoryOverSteps()
    before = Footprint.now()
    tasks_left, summary = asyncio.run(_train(run_dir / "run", episodes // per_step, failed_share, memory))
    half = np.array(memory.resident_bytes[len(memory.resident_bytes) // 2 :], np.float64)
    slope = np.polynomial.Polynomial.fit(np.arange(len(half)) * per_step, half, 1).convert().coef[1]
    return Soaked(
        trained=summary["books"]["trained"],
        failed_attempts=summary["retries"],
        before=before,
        after=Footprint.now(),
        tasks_left=tasks_left,
        bytes_per_episode_in_second_half=float(slope),
        grown_mb=(half[-1] - memory.resident_bytes[len(memory.resident_bytes) // 10]) / 1e6,
    )


async def _train(run_dir: Path, steps: int, failed_share: float, memory: MemoryOverSteps) -> tuple[int, dict[str, Any]]:
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    plugins.register(memory, "memory")
    overrides = (
        f"training.steps={steps}", f"training.groups_per_step={GROUPS_PER_STEP}",
        f"training.rollouts_per_group={ROLLOUTS_PER_GROUP}", "training.validation_rollouts=0",
        "training.staleness_threshold=1", "training.partial_rollout=true", "training.checkpoint_every_steps=50",
        "rollout.max_attempts=20", "say_yes.turns=2", "training.trajectories_per_step=1",
    )  # fmt: skip
    assembly = assemble(load_run_config("say_yes", plugins, overrides=overrides, backend="scripted"), plugins)
    faults = Faults()
    faults.inject("workflow.run", raises(ValueError("soaked")), when=share(failed_share / 2, seed=1))
    faults.inject("completer.complete", raises(EngineError("soaked")), when=share(failed_share / 4, seed=2))
    with faults.installed(assembly, run_dir):
        summary = await launch.train(assembly, run_dir, resume=False, progress=Progress())
        return len(asyncio.all_tasks()) - 1, summary


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--failed-share", type=float, default=0.01)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), episodes=options.episodes, failed_share=options.failed_share)
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()

"""One run of backend ``verl`` on a workflow that waits, as for a tool or an environment: ``... verl_waiting REQUEST``.

Prints the result as JSON on the last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, ClassVar

from rllm_workflows.sort import SortWorkflow, prompt, score

from benchmarks.learning import read_lines
from benchmarks.trials import Row
from benchmarks.verl_workloads import SETTINGS
from rllm_core import hookimpl, providers
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.engine import Completer
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import Episode, Messages, Task
from rllm_viewer.verify import verify

WAIT_SECONDS = 2.0
TURNS = 2
GROUPS, ROLLOUTS = 8, 8
RESPONSE_TOKENS, MODEL_TOKENS = 6, 64
SEPARATED = {
    "verl.placement": '"separated"',
    "verl.checkpoint_engine": '"cpu_file"',
    "verl.checkpoint_engine_module": '"cpu_checkpoint_engine"',
}
MODES: dict[str, dict[str, Any]] = {
    "synchronous_colocated": {},
    "synchronous_separated": SEPARATED,
    "asynchronous_separated": {
        **SEPARATED,
        "training.staleness_threshold": 1.0,
        "training.partial_rollout": "true",
    },
}


class WaitingSort(SortWorkflow):
    """`SortWorkflow` that asks twice and waits after every answer."""

    name: ClassVar[str] = "waiting_sort"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs one rollout; both answers count equally."""
        asked = {"role": "user", "content": prompt(task.data["word"])}
        messages = Messages([asked])
        steps = []
        for _ in range(TURNS):
            step = await completer.complete(messages)
            await asyncio.sleep(WAIT_SECONDS)
            steps.append(step)
            messages.append(step.response)
            messages.append(asked)
        reward = statistics.fmean(score(step.text.strip(), task.data["answer"]) for step in steps)
        return self.episode(task, steps, reward=reward, is_correct=reward == 1.0)


@hookimpl
def workflows() -> list[providers.WorkflowProvider]:
    """The workflow above."""
    return [
        providers.WorkflowProvider(
            name=WaitingSort.name,
            load=f"{__name__}:WaitingSort",
            config="rllm_workflows.sort:SortConfig",
            run_file="rllm_workflows.sort:run_file",
            summary="sort, asked twice, with waits.",
        )
    ]


def configured(plugins: PluginManager, mode: str, *, model: str, ray_address: str, steps: int, seed: int) -> RunConfig:
    """Resolves the run file of a mode."""
    settings = {
        **SETTINGS,
        **MODES[mode],
        "verl.max_model_tokens": MODEL_TOKENS,
        "rollout.max_response_tokens": RESPONSE_TOKENS,
        "training.groups_per_step": GROUPS,
        "training.rollouts_per_group": ROLLOUTS,
        "training.steps": steps,
        "training.seed": seed,
        "model.path": f'"{model}"',
        "verl.ray_address": f'"{ray_address}"',
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_run_config(WaitingSort.name, plugins, overrides=overrides, backend="verl", parser="chat_template")


def train(mode: str, folder: str, **request: Any) -> Row:
    """Trains one run.

    Raises:
        RuntimeError: If verification fails.
    """
    plugins = PluginManager.from_environment()
    plugins.register(sys.modules[__name__], "waiting")
    assembly = assemble(configured(plugins, mode, **request), plugins)
    asyncio.run(launch.train(assembly, Path(folder), resume=False, progress=Progress()))
    checked = verify(Path(folder))
    if not checked.holds:
        raise RuntimeError(f"verification of mode {mode} failed: {checked.problems[:3]}")
    metrics, timings = (read_lines(Path(folder) / name) for name in ("metrics.jsonl", "timings.jsonl"))
    return {
        "step_seconds": [round(row["step_seconds"], 3) for row in timings],
        "generation_wait_seconds": round(sum(row["generation_wait_seconds"] for row in timings), 2),
        "sampled_tokens": sum(row["sampled_tokens"] for row in metrics),
        "staleness_mean": round(statistics.fmean(row["staleness_mean"] for row in metrics), 3),
        "staleness_max": checked.max_staleness,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))))

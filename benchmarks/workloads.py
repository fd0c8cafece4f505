"""Workloads of both sides: one run file, from which the peer's settings are derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllm_workflows import sort

from benchmarks import endless
from rllm_core.assembly.resolution import load_run_config
from rllm_core.assembly.tasks import TaskStream
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.types import Task
from rllm_core.workflow import Workflow

VALIDATION_ROLLOUTS = 512

SORT = {"training.groups_per_step": 16, "training.rollouts_per_group": 16, "rollout.max_response_tokens": 6}
"""The starter task as in ``rllm-core train sort``: prompts of about a dozen tokens, answers of five."""

LONG = {
    "training.groups_per_step": 8,
    "training.rollouts_per_group": 8,
    "rollout.max_response_tokens": 256,
    "optimizer.learning_rate": 1e-5,
}
"""Prompts of 32 tokens, completions of exactly 256.

The learning rate is low, so that completions stay diverse. Equal completions would share prefixes, and equal rewards
would give zero advantages; both would spare our side some of the work of long completions.
"""

REAL_VOCABULARY = {
    "training.groups_per_step": 4,
    "training.rollouts_per_group": 4,
    "rollout.max_response_tokens": 64,
    "optimizer.learning_rate": 1e-5,
}
"""As `LONG`, with 64 tokens of a vocabulary of 151,936: the head is most of the work, and of the memory."""

GPU = {**LONG, "training.groups_per_step": 16, "training.rollouts_per_group": 16}
"""As `LONG`, with enough rollouts to fill a GPU."""

GPU_TINY = {
    "training.groups_per_step": 2,
    "training.rollouts_per_group": 2,
    "rollout.max_response_tokens": 16,
    "optimizer.learning_rate": 1e-5,
}
"""As `GPU`, small enough for a CPU."""

WORKLOADS: dict[str, dict[str, Any]] = {
    "sort": SORT,
    "endless": LONG,
    "real_vocabulary": REAL_VOCABULARY,
    "gpu": GPU,
    "gpu_tiny": GPU_TINY,
}
WORKFLOWS = {name: "sort" if name == "sort" else "endless" for name in WORKLOADS}

BOTH_SIDES_ALIKE = {
    "algorithm.name": "grpo",
    "algorithm.loss": "reinforce",
    "algorithm.aggregation": "token_mean",
    "algorithm.entropy_coefficient": 0.0,
    "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
}
ON_DEVICE = {
    "cpu": {"local.device": '"cpu"', "local.dtype": '"float32"', "local.threads": 1},
    # Weights of float32, forward passes in bfloat16.
    "cuda": {"local.device": '"cuda"', "local.dtype": '"bfloat16"'},
}


def plugin_manager() -> PluginManager:
    """Returns the installed plugins, and the workflow ``endless``."""
    plugins = PluginManager.from_environment()
    plugins.register(endless, "benchmarks")
    return plugins


def prompt_of(workload: str, task: Task) -> list[dict[str, str]]:
    """Returns the messages of the workflow's prompt."""
    content = task.data["word"] if WORKFLOWS[workload] == "endless" else sort.prompt(task.data["word"])
    return [{"role": "user", "content": content}]


def run_config(
    plugins: PluginManager, workload: str, *, model: str, seed: int, steps: int, device: str = "cpu"
) -> RunConfig:
    """Resolves the run file of a workload."""
    settings = {
        **BOTH_SIDES_ALIKE,
        **ON_DEVICE[device],
        **WORKLOADS[workload],
        "model.path": f'"{model}"',
        "training.seed": seed,
        "training.steps": steps,
        "training.validation_rollouts": VALIDATION_ROLLOUTS if workload == "sort" else 0,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load_run_config(WORKFLOWS[workload], plugins, overrides=overrides, backend="local")


def training_tasks(workflow: Workflow, config: RunConfig) -> Sequence[Task]:
    """Returns the tasks of all steps, in the core's order."""
    stream = TaskStream(workflow.tasks("train"), config.training.seed)
    return [stream[ordinal] for ordinal in range(config.training.steps * config.training.groups_per_step)]

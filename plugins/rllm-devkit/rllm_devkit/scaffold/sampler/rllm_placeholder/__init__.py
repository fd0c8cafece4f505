"""Hooks of task sampler ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import TaskSamplerProvider

RLLM_CORE_API = "1.0"


@hookimpl
def task_samplers() -> list[TaskSamplerProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        TaskSamplerProvider(
            name="placeholder",
            load="rllm_placeholder.sampler:PlaceholderSampler",
            summary="Leaves out tasks that were solved by all rollouts of their last group.",
        )
    ]

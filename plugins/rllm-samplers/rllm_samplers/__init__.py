"""Plugin hooks of the task samplers. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import TaskSamplerProvider

RLLM_CORE_API = "1.0"


@hookimpl
def task_samplers() -> list[TaskSamplerProvider]:
    """Provides task samplers ``difficulty``, ``mixture`` and ``stages``."""
    return [
        TaskSamplerProvider(
            name="difficulty",
            load="rllm_samplers.difficulty:Difficulty",
            summary="Prefers tasks that are solved sometimes but not always, and revisits the others.",
        ),
        TaskSamplerProvider(
            name="mixture",
            load="rllm_samplers.mixture:Mixture",
            summary="Draws from named subsets of the tasks by weight.",
        ),
        TaskSamplerProvider(
            name="stages",
            load="rllm_samplers.stages:Stages",
            summary="Draws from one set of tasks after another, by step or solve rate.",
        ),
    ]

"""Workflow ``placeholder`` for rllm-core: hooks only, so that listing it imports nothing else."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Workflow

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[Workflow]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        Workflow(
            name="placeholder",
            load="rllm_placeholder.workflow:PlaceholderWorkflow",
            config="rllm_placeholder.workflow:PlaceholderConfig",
            run_file="rllm_placeholder.workflow:run_file",
            summary="Spell a word backwards.",
        )
    ]

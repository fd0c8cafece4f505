"""Hooks of workflow ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        WorkflowProvider(
            name="placeholder",
            load="rllm_placeholder.workflow:PlaceholderWorkflow",
            config="rllm_placeholder.workflow:PlaceholderConfig",
            run_file="rllm_placeholder.workflow:run_file",
            summary="Spell a word backwards.",
        )
    ]
